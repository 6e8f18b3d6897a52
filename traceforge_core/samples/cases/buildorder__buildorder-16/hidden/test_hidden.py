import unittest

from buildorder.order import CycleError, build_order


class HiddenOrderTest(unittest.TestCase):
    def test_diamond(self):
        needs = {"app": ["ui", "db"], "ui": ["core"], "db": ["core"], "core": []}
        order = build_order(needs)
        self.assertEqual(sorted(order), sorted(needs))
        for name, needed in needs.items():
            for other in needed:
                self.assertLess(order.index(other), order.index(name))

    def test_needed_before_by_an_earlier_name(self):
        self.assertEqual(build_order({"a": [], "b": ["a"]}), ["a", "b"])

    def test_cycles(self):
        for needs in ({"a": ["a"]}, {"a": ["b"], "b": ["c"], "c": ["a"]}):
            with self.subTest(needs), self.assertRaises(CycleError):
                build_order(needs)
