"""Checks an input file record by record, in one pass over its bytes, keeping none of them.

lines    physical lines out of chunks
records  the codes of rejected records
"""

from streams.core.validate.lines import Line, Lines, UnsupportedEncoding
from streams.core.validate.records import Accepted, TooManyRecords, Validator

__all__ = ["Accepted", "Line", "Lines", "TooManyRecords", "UnsupportedEncoding", "Validator"]
