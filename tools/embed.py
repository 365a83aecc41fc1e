#!/usr/bin/env python3
"""Writes a C++ file that holds text files: embed.py OUT.cpp FUNCTION FILE...

The function returns them as {name without suffix, content}. Declared in src/config/embedded.h.
"""
import pathlib
import sys

out, function, *files = sys.argv[1:]
rows = []
for file in sorted(map(pathlib.Path, files)):
    # Raw strings of at most 8 KB: compilers limit the length of one literal.
    text = file.read_text(encoding="utf-8")
    pieces = [text[i:i + 8000] for i in range(0, len(text), 8000)]
    literal = "\n".join(f'R"~~~~({p})~~~~"' for p in pieces)
    rows.append(f'      {{"{file.stem}", {literal}}},')
pathlib.Path(out).write_text(f"""#include "config/embedded.h"

namespace gdn::config {{

const std::vector<EmbeddedFile>& {function}() {{
  static const std::vector<EmbeddedFile> files{{
{chr(10).join(rows)}
  }};
  return files;
}}

}} // namespace gdn::config
""", encoding="utf-8")
