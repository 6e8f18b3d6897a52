import unittest

from humantime.durations import describe, seconds


class DurationTest(unittest.TestCase):
    def test_several_parts(self):
        self.assertEqual(seconds("1h 30m"), 5400)
        self.assertEqual(seconds("2D"), 172800)

    def test_round_trip(self):
        for total in (0, 59, 3601, 90061):
            self.assertEqual(seconds(describe(total)), total)
