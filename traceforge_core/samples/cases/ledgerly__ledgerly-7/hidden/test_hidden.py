import unittest

from ledgerly.split import split_cents


class HiddenSplitTest(unittest.TestCase):
    def test_left_over_cents_go_to_the_first(self):
        self.assertEqual(split_cents(100, 3), [34, 33, 33])
        self.assertEqual(split_cents(200, 3), [67, 67, 66])

    def test_parts_differ_by_a_cent_at_most(self):
        for amount in range(-50, 50):
            parts = split_cents(amount, 7)
            self.assertEqual(sum(parts), amount)
            self.assertLessEqual(max(parts) - min(parts), 1)
