import unittest

from cachebox.lru import LruCache


class LruTest(unittest.TestCase):
    def test_size_is_bounded(self):
        cache = LruCache(2)
        for number in range(5):
            cache.put(number, str(number))
        self.assertEqual((len(cache), cache.peek(4)), (2, "4"))

    def test_missing_key_gives_the_default(self):
        self.assertEqual(LruCache(1).get("nothing", 7), 7)
