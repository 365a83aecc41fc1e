#include "report/document.h"

#include <algorithm>

#include <fmt/core.h>

namespace gdn::report {

Document& Document::heading(std::string text) {
  blocks.emplace_back(Heading{std::move(text)});
  return *this;
}

Document& Document::line(std::string text, Tone tone, int indent) {
  blocks.emplace_back(Line{std::move(text), tone, indent});
  return *this;
}

Document& Document::verbatim(std::string text, int indent) {
  blocks.emplace_back(Line{std::move(text), Tone::Plain, indent, true});
  return *this;
}

Document& Document::pairs(std::vector<std::pair<std::string, std::string>> rows) {
  blocks.emplace_back(Pairs{std::move(rows)});
  return *this;
}

Document& Document::table(Table t) {
  blocks.emplace_back(std::move(t));
  return *this;
}

Document& Document::figure(std::string svg, std::string caption) {
  blocks.emplace_back(Figure{std::move(svg), std::move(caption)});
  return *this;
}

namespace {

// Columns a UTF-8 text takes (every code point counts one).
int width_of(std::string_view text) {
  int n = 0;
  for (char c : text) n += (static_cast<unsigned char>(c) & 0xC0) != 0x80;
  return n;
}

std::string paint(const std::string& text, Tone tone, bool colour) {
  if (!colour || tone == Tone::Plain || text.empty()) return text;
  const char* code = "";
  switch (tone) {
  case Tone::Good: code = "32"; break;
  case Tone::Warn: code = "33"; break;
  case Tone::Bad: code = "31"; break;
  case Tone::Dim: code = "2"; break;
  case Tone::Strong: code = "1"; break;
  case Tone::Plain: break;
  }
  return fmt::format("\x1b[{}m{}\x1b[0m", code, text);
}

constexpr int kNarrowest = 8; // columns that text is broken into

// How much of a word that is longer than `room` comes before the break: up to a joint of a name, if that leaves half.
size_t cut_of(const std::string& word, size_t room) {
  const size_t joint = word.find_last_of("._-/=", room - 1);
  return joint != std::string::npos && 2 * (joint + 1) >= room ? joint + 1 : room;
}

std::vector<std::string> wrap(const std::string& text, int width) {
  width = std::max(width, kNarrowest);
  std::vector<std::string> lines(1);
  size_t at = 0;
  while (at < text.size()) {
    size_t end = text.find(' ', at);
    if (end == std::string::npos) end = text.size();
    std::string word = text.substr(at, end - at);
    at = end + 1;
    if (!lines.back().empty() && width_of(lines.back()) + 1 + width_of(word) > width) lines.emplace_back();
    if (!lines.back().empty()) lines.back() += ' ';
    while (width_of(word) > width && width_of(word) == static_cast<int>(word.size())) { // longer than a line: cut
      const size_t cut = cut_of(word, static_cast<size_t>(width - width_of(lines.back())));
      lines.back() += word.substr(0, cut);
      word = word.substr(cut);
      lines.emplace_back();
    }
    lines.back() += word;
  }
  return lines;
}

std::string pad(const std::string& text, int width, Align align) {
  const std::string space(static_cast<size_t>(std::max(0, width - width_of(text))), ' ');
  return align == Align::Left ? text + space : space + text;
}

std::string trimmed(std::string line) {
  while (!line.empty() && line.back() == ' ') line.pop_back();
  return line + "\n";
}

class TextRenderer {
public:
  explicit TextRenderer(const TextStyle& style) : style_(style) {}

  std::string run(const Document& d) {
    for (const Block& b : d.blocks) std::visit([&](const auto& block) { render(block); }, b);
    return std::move(out_);
  }

private:
  void render(const Figure&) {}

  void render(const Heading& h) {
    if (!out_.empty()) out_ += "\n";
    for (const std::string& line : wrap(h.text, style_.width)) out_ += paint(line, Tone::Strong, style_.colour) + "\n";
  }

  void render(const Line& l) {
    const std::string indent(static_cast<size_t>(l.indent), ' ');
    if (l.verbatim) {
      out_ += trimmed(indent + l.text);
      return;
    }
    const int hang = l.text.rfind("- ", 0) == 0 ? 2 : 0;
    std::vector<std::string> lines = wrap(l.text, style_.width - l.indent - hang);
    for (size_t i = 0; i < lines.size(); ++i)
      out_ += trimmed(indent + std::string(static_cast<size_t>(i ? hang : 0), ' ') + paint(lines[i], l.tone, style_.colour));
  }

  void render(const Pairs& p) {
    int key = 0;
    for (const auto& [k, v] : p.rows) key = std::max(key, width_of(k));
    for (const auto& [k, v] : p.rows) {
      std::vector<std::string> lines = wrap(v, style_.width - key - 4);
      for (size_t i = 0; i < lines.size(); ++i)
        out_ += trimmed("  " + pad(i ? "" : k, key, Align::Left) + "  " + lines[i]);
    }
  }

  void render(const Table& t) {
    std::vector<int> widths;
    for (size_t c = 0; c < t.columns.size(); ++c) {
      int w = width_of(t.columns[c].title);
      for (const auto& row : t.rows) w = std::max(w, width_of(row[c].text));
      widths.push_back(w);
    }
    shrink(t, widths);
    std::vector<Cell> titles;
    for (const Column& c : t.columns) titles.push_back({c.title, Tone::Dim});
    row(t, widths, titles);
    for (const auto& r : t.rows) row(t, widths, r);
  }

  // Takes the excess over the terminal from flexible columns, widest first.
  void shrink(const Table& t, std::vector<int>& widths) const {
    auto total = [&] {
      int sum = 0;
      for (int w : widths) sum += w + 2;
      return sum;
    };
    while (total() > style_.width) {
      int widest = -1;
      for (size_t c = 0; c < widths.size(); ++c)
        if (t.columns[c].flexible && widths[c] > kNarrowest && (widest < 0 || widths[c] > widths[static_cast<size_t>(widest)]))
          widest = static_cast<int>(c);
      if (widest < 0) return;
      --widths[static_cast<size_t>(widest)];
    }
  }

  void row(const Table& t, const std::vector<int>& widths, const std::vector<Cell>& cells) {
    std::vector<std::vector<std::string>> lines;
    size_t height = 1;
    for (size_t c = 0; c < cells.size(); ++c) {
      lines.push_back(width_of(cells[c].text) > widths[c] ? wrap(cells[c].text, widths[c]) : std::vector{cells[c].text});
      height = std::max(height, lines.back().size());
    }
    for (size_t i = 0; i < height; ++i) {
      std::string line;
      for (size_t c = 0; c < cells.size(); ++c) {
        const std::string text = pad(i < lines[c].size() ? lines[c][i] : "", widths[c], t.columns[c].align);
        line += "  " + paint(text, cells[c].tone, style_.colour);
      }
      out_ += trimmed(line);
    }
  }

  const TextStyle& style_;
  std::string out_;
};

std::string csv_field(const std::string& text) {
  if (text.find_first_of(",\"\n") == std::string::npos) return text;
  std::string quoted = "\"";
  for (char c : text) quoted += c == '"' ? "\"\"" : std::string(1, c);
  return quoted + "\"";
}

} // namespace

std::string render_text(const Document& document, const TextStyle& style) { return TextRenderer(style).run(document); }

std::string render_csv(const Document& document) {
  std::string out;
  for (const Block& b : document.blocks) {
    const Table* t = std::get_if<Table>(&b);
    if (!t) continue;
    if (!out.empty()) out += "\n";
    for (size_t c = 0; c < t->columns.size(); ++c) out += (c ? "," : "") + csv_field(t->columns[c].title);
    out += "\n";
    for (const auto& row : t->rows) {
      for (size_t c = 0; c < row.size(); ++c) out += (c ? "," : "") + csv_field(row[c].text);
      out += "\n";
    }
  }
  return out;
}

} // namespace gdn::report
