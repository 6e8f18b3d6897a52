def split_cents(amount, people):
    """Split an amount in cents into equal parts.

    Cents that are left over go one each to the first parts.
    """
    if people < 1:
        raise ValueError("people must be at least 1")
    return [round(amount / people)] * people


def balances(bills, members):
    """What each member owes (positive) or gets back (negative), in cents.

    A bill is a tuple (payer, amount).
    """
    owed = dict.fromkeys(members, 0)
    for payer, amount in bills:
        for member, part in zip(members, split_cents(amount, len(members)), strict=True):
            owed[member] += part
        owed[payer] -= amount
    return owed
