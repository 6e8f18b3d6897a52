import unittest

from routemap.router import Router


class RouterTest(unittest.TestCase):
    def setUp(self):
        self.routes = Router()
        self.routes.add("/about", "about")
        self.routes.add("/tags/{tag}", "tag")

    def test_plain_route(self):
        self.assertEqual(self.routes.resolve("/about"), ("about", {}))

    def test_parameter(self):
        self.assertEqual(self.routes.resolve("/tags/red"), ("tag", {"tag": "red"}))

    def test_no_route(self):
        self.assertIsNone(self.routes.resolve("/nothing"))
