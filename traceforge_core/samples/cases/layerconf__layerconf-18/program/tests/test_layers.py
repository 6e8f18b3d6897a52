import unittest

from layerconf.layers import merge


class MergeTest(unittest.TestCase):
    def test_nested_values(self):
        merged = merge({"a": {"x": 1, "y": 2}}, {"a": {"y": 3}, "b": 4})
        self.assertEqual(merged, {"a": {"x": 1, "y": 3}, "b": 4})

    def test_a_value_replaces_a_dictionary(self):
        self.assertEqual(merge({"a": {"x": 1}}, {"a": None}), {"a": None})
