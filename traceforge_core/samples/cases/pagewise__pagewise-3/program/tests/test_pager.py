import unittest

from pagewise.pager import Pager


class PagerTest(unittest.TestCase):
    def setUp(self):
        self.pager = Pager(list("abcdefg"), size=3)

    def test_pages(self):
        self.assertEqual(self.pager.pages, 3)
        self.assertEqual(self.pager.page(3), ["g"])

    def test_next(self):
        self.assertTrue(self.pager.has_next(2))
        self.assertFalse(self.pager.has_next(3))

    def test_no_such_page(self):
        with self.assertRaises(IndexError):
            self.pager.page(4)
