import unittest

from tidycsv.parser import parse_line


class HiddenParserTest(unittest.TestCase):
    def test_doubled_quotes(self):
        self.assertEqual(parse_line('7,"say ""hi"" twice",ok'), ["7", 'say "hi" twice', "ok"])
        self.assertEqual(parse_line('"""x"""'), ['"x"'])

    def test_empty_fields(self):
        self.assertEqual(parse_line(""), [""])
        self.assertEqual(parse_line('a,"",b'), ["a", "", "b"])
