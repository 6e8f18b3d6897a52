import unittest

from slugline.slugs import SlugRegistry


class HiddenSlugTest(unittest.TestCase):
    def test_numbered_title_first(self):
        names = SlugRegistry()
        given = [names.claim(title) for title in ("Release 2", "Release", "Release", "Release")]
        self.assertEqual(len(set(given)), 4)
        self.assertEqual(given[:2], ["release-2", "release"])

    def test_numbered_title_last(self):
        names = SlugRegistry()
        given = [names.claim(title) for title in ("Release", "Release", "Release 2", "Release 2")]
        self.assertEqual(len(set(given)), 4)
