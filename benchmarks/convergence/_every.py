"""All contenders by name, those of every study."""

from _contenders import CONTENDERS, LONG_ONLY
from _formats import FORMATS

EVERY = {**CONTENDERS, **LONG_ONLY, **FORMATS}
