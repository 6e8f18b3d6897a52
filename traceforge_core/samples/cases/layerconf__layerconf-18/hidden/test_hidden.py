import copy
import unittest

from layerconf.layers import DEFAULTS, load_settings, merge


class HiddenMergeTest(unittest.TestCase):
    def test_defaults_stay(self):
        before = copy.deepcopy(DEFAULTS)
        load_settings({"editor": {"tabs": 2}, "theme": {"colors": {"text": "blue"}}, "extra": 1})
        self.assertEqual(DEFAULTS, before)

    def test_nothing_is_shared(self):
        base, extra = {"a": {"x": 1}}, {"b": {"y": 2}}
        merged = merge(base, extra)
        merged["a"]["x"] = merged["b"]["y"] = 99
        self.assertEqual((base, extra), ({"a": {"x": 1}}, {"b": {"y": 2}}))
