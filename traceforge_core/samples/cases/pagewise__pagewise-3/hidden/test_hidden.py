import unittest

from pagewise.pager import Pager


class HiddenPagerTest(unittest.TestCase):
    def test_full_pages(self):
        pager = Pager(list(range(20)), size=10)
        self.assertEqual(pager.pages, 2)
        self.assertFalse(pager.has_next(2))
        with self.assertRaises(IndexError):
            pager.page(3)

    def test_empty_listing(self):
        pager = Pager([], size=5)
        self.assertEqual((pager.pages, pager.page(1)), (1, []))

    def test_pages_before_the_first(self):
        for number in (0, -1):
            with self.subTest(number), self.assertRaises(IndexError):
                Pager(list(range(20)), size=10).page(number)
