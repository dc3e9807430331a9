"""Numbers of sentences that state a bound, as "at most" and "and more" do: rounded to the side on which they hold."""

from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal, localcontext


def rounded_up(x: float, form: str) -> str:
    """`x` in this format, as `f"{x:.1g}"` has it, but no smaller than `x`: for "at most" and "no more than"."""
    return _rounded(x, form, ROUND_CEILING)


def rounded_down(x: float, form: str) -> str:
    """`x` in this format, but no larger than `x`: for "at least" and "and more"."""
    return _rounded(x, form, ROUND_FLOOR)


def _rounded(x: float, form: str, rounding: str) -> str:
    """The shortest decimal that reads back as `x`, not its binary digits: 0.05 is 5%, not 6%."""
    with localcontext(rounding=rounding):
        return format(Decimal(repr(float(x))), form)
