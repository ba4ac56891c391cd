"""The kinds of arm, one a file. The table BUILT_IN of grammar.py names what reads each."""
