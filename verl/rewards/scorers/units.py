"""Units at the end of answers: math-verify drops them, so that 5 m would equal 5 cm."""

from __future__ import annotations

import re

_NAMES = {
    **{"mm": "millimeter millimetre", "cm": "centimeter centimetre", "m": "meter metre", "km": "kilometer kilometre"},
    **{"in": "inch inches", "ft": "foot feet", "yd": "yard", "mi": "mile"},
    **{"mg": "milligram", "g": "gram", "kg": "kilogram", "lb": "lbs pound", "oz": "ounce", "t": "ton tonne"},
    **{"s": "sec second", "min": "mins minute", "h": "hr hrs hour", "day": "", "week": "", "month": "", "year": "yr"},
    **{"ml": "mL milliliter millilitre", "l": "L liter litre", "gal": "gallon", "mph": "", "kph": ""},
    **{"dollar": "", "cent": "", "euro": "", "deg": "degree", "rad": "radian", "N": "newton", "J": "joule"},
    **{"W": "watt", "kW": "kilowatt", "V": "volt", "A": "ampere amp", "Hz": "hertz", "K": "kelvin", "C": "celsius"},
}
_UNITS = {name: unit for unit, names in _NAMES.items() for name in (unit, *names.split())}
_UNITS |= {f"{name}s": unit for name, unit in _UNITS.items() if len(name) > 3 and not name.endswith("s")}
_PARTS = {"mph": (("mi", 1), ("h", 1)), "kph": (("km", 1), ("h", 1)), "ml": (("cm", 3),)}  # other names of units
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_TEXT_COMMAND = re.compile(r"\\(?:text|textrm|textbf|mathrm|mathbf|mbox|rm|operatorname)\b")
_OTHER_COMMAND = re.compile(r"\\(?:[A-Za-z]+|.)|[{}~$]")
_PART = re.compile(r"(?:(square|sq|cubic|cu)\.? )?([A-Za-z]+)\.?(?: ?\^ ?(\d))?")

Unit = tuple[tuple[str, int], ...]


def read_unit(answer: str) -> Unit | None:
    r"""Return the unit with which an answer ends, as (name, power) of each part; None without a known unit.

    >>> read_unit("5\\text{ square meters}"), read_unit("90 km/h"), read_unit("5x")
    ((('m', 2),), (('km', 1), ('h', 1)), None)
    """
    text = _OTHER_COMMAND.sub(" ", _TEXT_COMMAND.sub(" ", answer.rpartition("=")[2]))
    word = re.search(r"[A-Za-z]", text)
    if word is None:
        return None
    parts = re.split(r" ?/ ?| per ", " ".join(text[word.start() :].split()))
    found = [_PART.fullmatch(part) for part in parts]
    units = [(_UNITS.get(part[2]) or _UNITS.get(part[2].lower()), part) for part in found if part is not None]
    if len(units) < len(parts) or any(unit is None for unit, _ in units):
        return None
    powers = [(str(unit), int(part[3] or _POWERS.get(part[1] or "", 1))) for unit, part in units]
    return tuple((name, of_part * power) for unit, power in powers for name, of_part in _PARTS.get(unit, ((unit, 1),)))
