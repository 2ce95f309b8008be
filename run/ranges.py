"""Types of options with their ranges, which run/instantiate.py and run/settings.py check.

Four types also exist in pydantic, which model/ and data/ do not import.
"""

from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt

MAX_INT = 2**63 - 1  # of the sizes and seeds that torch accepts
PositiveInt = Annotated[int, Gt(0), Le(MAX_INT)]
NonNegativeInt = Annotated[int, Ge(0), Le(MAX_INT)]
PositiveFloat = Annotated[float, Gt(0)]
NonNegativeFloat = Annotated[float, Ge(0)]
Fraction = Annotated[float, Ge(0), Le(1)]
BelowOne = Annotated[float, Ge(0), Lt(1)]  # such as a dropout rate
AboveOne = Annotated[float, Gt(1)]  # such as the base of the RoPE frequencies
AtLeastTwo = Annotated[int, Ge(2), Le(MAX_INT)]
