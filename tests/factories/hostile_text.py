"""Strings with a special meaning in some output format."""

HOSTILE = (
    "=1+1", "+1", "-1", "@SUM(1)", "\t=1", "::error::forged", " ::set-output name=x::1", "##[error]forged",
    "a\n::error::b", "<script>alert(1)</script>", "'\"><img src=x onerror=alert(1)>", "]]>", "&amp;", "| cell |",
    "`code`", "*b* _i_ [l](u)", "\x1b[31mred", "a\u202egnp.exe", "line\u2028separator\u2029", "\x00", "\ud800",
    "\ufffe", "{{7*7}}", "%0A::error::", "~~x~~",
)  # fmt: skip
"""At least one string per output format."""
