import unittest

from slugline.slugs import SlugRegistry, slugify


class SlugTest(unittest.TestCase):
    def test_accents_and_signs_are_dropped(self):
        self.assertEqual(slugify("Café, au lait!"), "cafe-au-lait")

    def test_a_repeated_title_gets_a_number(self):
        names = SlugRegistry()
        self.assertEqual([names.claim("News") for _ in range(3)], ["news", "news-2", "news-3"])
