import unittest

from buildorder.order import build_order


class OrderTest(unittest.TestCase):
    def test_chain(self):
        self.assertEqual(build_order({"c": ["b"], "b": ["a"]}), ["a", "b", "c"])

    def test_independent_names(self):
        self.assertEqual(build_order({"x": [], "y": []}), ["x", "y"])
