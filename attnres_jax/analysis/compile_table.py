"""Rows of compile_check as a table for people."""


def table(rows: list[dict]) -> str:
  """A Markdown table, and below it the operations that the rows list."""
  heads = (
    "mixer", "fits", "arguments", "temporaries", "HBM traffic", "TFLOP",
    "collectives", "modelled step", "/ baseline", "bound / baseline", "compile",
  )  # fmt: skip
  first = rows[0]
  mesh = ", ".join(f"{k}={v}" for k, v in first["mesh"].items())
  lines = [
    f"{first['config']}, {first['program']}, {first['topology']}, mesh {mesh};"
    f" {first['measured']}",
    "",
    f"| {' | '.join(heads)} |",
    "|---" * len(heads) + "|",
  ]
  for row in rows:
    cells = (
      row["mixer"],
      "yes" if row["fits"] else "NO",
      _size(row["argument_bytes"], 2**30, "GiB"),
      _size(row["temp_bytes"], 2**30, "GiB"),
      _size(row["hbm_bytes"], 1e9, "GB"),
      _size(row["flops"], 1e12, ""),
      ", ".join(
        f"{entry['count']} {kind} {entry['bytes'] / 1e9:.2f} GB"
        for kind, entry in (row["collectives"] or {}).items()
      ),
      _size(row["modelled_step_s"], 1, "s", digits=3),
      _size(row["ratio_to_baseline"], 1, "", digits=4),
      _size(row["bound_ratio_to_baseline"], 1, "", digits=4),
      _size(row["compile_s"], 1, "s", digits=0),
    )
    lines.append(f"| {' | '.join(cells)} |")
  for row in rows:
    if row.get("top"):
      lines += ["", f"{row['mixer']}: what takes the modelled time", ""]
      lines += [
        f"{part['seconds'] * 1e3:10.3f} ms  {part['bound']:5}"
        f"  {part['instructions']:4} x  {part['operation']}"
        for part in row["top"]
      ]
  return "\n".join(lines)


def _size(value, unit, name, digits=2) -> str:
  if value is None:
    return "-"
  return f"{value / unit:,.{digits}f} {name}".strip()
