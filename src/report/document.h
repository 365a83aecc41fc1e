#pragma once
#include <string>
#include <utility>
#include <variant>
#include <vector>

// One model of what a command says, before it is text: headings, lines, name-value pairs, tables.
namespace gdn::report {

enum class Align { Left, Right };

struct Column {
  std::string title;
  Align align = Align::Left;
  bool flexible = false; // wrapped when the table is wider than the terminal
};

enum class Tone { Plain, Good, Warn, Bad, Dim, Strong };

struct Cell {
  std::string text;
  Tone tone = Tone::Plain;
  Cell(std::string t, Tone tn = Tone::Plain) : text(std::move(t)), tone(tn) {}
  Cell(const char* t) : text(t) {}
};

struct Table {
  std::string name;                      // file name of its CSV
  std::vector<Column> columns;
  std::vector<std::vector<Cell>> rows = {};
};

struct Heading { std::string text; };
// Wrapped at the width; `indent` columns, a hanging indent behind the first word of a bullet.
struct Line {
  std::string text;
  Tone tone = Tone::Plain;
  int indent = 0;
  bool verbatim = false; // never wrapped (something to paste)
};
struct Pairs {
  std::vector<std::pair<std::string, std::string>> rows;
};

// A drawing (report/figure.h): shown by HTML, passed over by text and CSV.
struct Figure {
  std::string svg, caption;
};

using Block = std::variant<Heading, Line, Pairs, Table, Figure>;

struct Document {
  std::vector<Block> blocks = {};

  Document& heading(std::string text);
  Document& line(std::string text, Tone tone = Tone::Plain, int indent = 0);
  Document& verbatim(std::string text, int indent = 2); // something to paste
  Document& pairs(std::vector<std::pair<std::string, std::string>> rows);
  Document& table(Table t);
  Document& figure(std::string svg, std::string caption);
};

struct TextStyle {
  int width = 100;
  bool colour = false;
};

// Plain text, no line longer than the width (verbatim lines excepted), each line ended by '\n'.
std::string render_text(const Document& document, const TextStyle& style = {});
// RFC 4180 of every table in the document, a blank line between two.
std::string render_csv(const Document& document);

} // namespace gdn::report
