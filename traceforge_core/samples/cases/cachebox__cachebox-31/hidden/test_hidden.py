import unittest

from cachebox.lru import LruCache


class HiddenLruTest(unittest.TestCase):
    def setUp(self):
        self.cache = LruCache(2)
        self.cache.put("a", 1)
        self.cache.put("b", 2)

    def test_reading_is_use(self):
        self.cache.get("a")
        self.cache.put("c", 3)
        self.assertEqual((self.cache.peek("a"), self.cache.peek("b")), (1, None))

    def test_overwriting_is_use(self):
        self.cache.put("a", 10)
        self.cache.put("c", 3)
        self.assertEqual((self.cache.peek("a"), self.cache.peek("b")), (10, None))

    def test_peek_is_not(self):
        self.cache.peek("a")
        self.cache.put("c", 3)
        self.assertIsNone(self.cache.peek("a"))

    def test_reading_a_missing_key_adds_nothing(self):
        self.assertIsNone(self.cache.get("z"))
        self.assertEqual(len(self.cache), 2)
