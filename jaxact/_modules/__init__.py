"""Module libraries: one file each, behind one interface.

`adapter.py` lists the functions that a library's file gives, `find.py` finds the file
for a value, and `pure.py` turns a call with modules into one with arrays alone.
"""
