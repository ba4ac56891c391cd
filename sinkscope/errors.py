"""The one error a user is meant to read: a sentence saying what is wrong and what to do. The command line exits 2."""


class SinkscopeError(Exception):
    """Something the user can mend: a wrong name, a damaged file, data that do not fit. One line, no traceback."""
