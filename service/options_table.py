"""The table of options in the README: ``python -m service.options_table``."""

from __future__ import annotations

from service.settings import SHIPPED_MODEL, Settings, option_name


def options_table() -> str:
    """The options as a Markdown table."""
    lines = ["| option | default | meaning |", "| --- | --- | --- |"]
    for name, field in Settings.model_fields.items():
        default = field.default
        if default is None or default == ():
            shown = ""
        elif isinstance(default, bool):
            shown = "on" if default else "off"
        else:
            shown = "`models/eyas-14m`" if default == SHIPPED_MODEL else f"`{default}`"
        lines.append(f"| `{option_name(name)}` | {shown} | {field.description} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(options_table())
