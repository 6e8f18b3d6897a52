def parse_line(line, delimiter=","):
    """The fields of one line. A field in quotes may hold the delimiter."""
    fields = []
    field = ""
    quoted = False
    for char in line:
        if char == '"':
            quoted = not quoted
        elif char == delimiter and not quoted:
            fields.append(field)
            field = ""
        else:
            field += char
    fields.append(field)
    return fields


def parse(text, delimiter=","):
    """One dictionary a row, by the names in the first line."""
    lines = text.splitlines()
    names = parse_line(lines[0], delimiter)
    return [dict(zip(names, parse_line(line, delimiter), strict=True)) for line in lines[1:]]
