import unittest

from humantime.durations import seconds


class HiddenDurationTest(unittest.TestCase):
    def test_fractions(self):
        self.assertEqual(seconds("1.5h"), 5400)
        self.assertEqual(seconds("0.5m 10s"), 40)

    def test_nonsense_is_an_error(self):
        for text in ("soon", "2h of work", "", "h", "1.2.3h"):
            with self.subTest(text), self.assertRaises(ValueError):
                seconds(text)
