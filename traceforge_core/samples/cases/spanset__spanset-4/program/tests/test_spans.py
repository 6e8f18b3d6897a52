import unittest

from spanset.spans import covered, gaps, merge_spans


class SpanTest(unittest.TestCase):
    def test_overlapping_spans(self):
        self.assertEqual(merge_spans([(3, 6), (0, 4)]), [(0, 6)])

    def test_touching_spans(self):
        self.assertEqual(merge_spans([(1, 2), (2, 3)]), [(1, 3)])

    def test_gaps(self):
        self.assertEqual(gaps([(9, 10), (12, 13)], 8, 18), [(8, 9), (10, 12), (13, 18)])

    def test_covered(self):
        self.assertEqual(covered([(0, 2), (5, 6)]), 3)
