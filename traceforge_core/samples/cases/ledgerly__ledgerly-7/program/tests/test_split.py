import unittest

from ledgerly.split import balances, split_cents


class SplitTest(unittest.TestCase):
    def test_even_amounts(self):
        self.assertEqual(split_cents(90, 3), [30, 30, 30])

    def test_nobody_is_an_error(self):
        with self.assertRaises(ValueError):
            split_cents(10, 0)

    def test_balances_add_up_to_zero(self):
        owed = balances([("ann", 40), ("bob", 20)], ["ann", "bob"])
        self.assertEqual(owed, {"ann": -10, "bob": 10})
