import unittest

from spanset.spans import covered, gaps, merge_spans


class HiddenSpanTest(unittest.TestCase):
    def test_a_span_inside_another(self):
        self.assertEqual(merge_spans([(0, 10), (2, 4), (8, 9)]), [(0, 10)])
        self.assertEqual(merge_spans([(0, 10), (1, 3), (5, 12)]), [(0, 12)])

    def test_gaps_stay_apart(self):
        self.assertEqual(merge_spans([(0, 3), (4, 5)]), [(0, 3), (4, 5)])

    def test_what_builds_on_it(self):
        self.assertEqual(covered([(0, 10), (2, 4)]), 10)
        self.assertEqual(gaps([(0, 10), (2, 4)], 0, 12), [(10, 12)])
