import unittest

from tidycsv.parser import parse, parse_line


class ParserTest(unittest.TestCase):
    def test_plain_fields(self):
        self.assertEqual(parse_line("a;b;;c", ";"), ["a", "b", "", "c"])

    def test_delimiter_in_quotes(self):
        self.assertEqual(parse_line('1,"x, y",2'), ["1", "x, y", "2"])

    def test_rows_by_name(self):
        self.assertEqual(parse("id,name\n1,Ann\n"), [{"id": "1", "name": "Ann"}])
