DEFAULTS = {
    "editor": {"tabs": 4, "wrap": True},
    "theme": {"name": "plain", "colors": {"text": "black", "paper": "white"}},
}


def merge(base, extra):
    """`extra` laid over `base`; dictionaries are merged key by key."""
    result = base
    for key, value in extra.items():
        if isinstance(value, dict) and isinstance(result.get(key), dict):
            merge(result[key], value)
        else:
            result[key] = value
    return result


def load_settings(user):
    """The settings of a user: the defaults, and what the user changed."""
    return merge(DEFAULTS, user)
