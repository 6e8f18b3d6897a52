import unittest

from routemap.router import Router


class HiddenRouterTest(unittest.TestCase):
    def setUp(self):
        self.routes = Router()
        self.routes.add("/users/{id}", "show user")
        self.routes.add("/users/{id}/posts", "list posts")

    def test_longer_route(self):
        self.assertEqual(self.routes.resolve("/users/7/posts"), ("list posts", {"id": "7"}))
        self.assertEqual(self.routes.resolve("/users/7"), ("show user", {"id": "7"}))

    def test_whole_path(self):
        self.assertIsNone(self.routes.resolve("/users/7/posts/3"))
        self.assertIsNone(self.routes.resolve("/users/"))
