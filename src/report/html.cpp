#include "report/html.h"

#include <fmt/core.h>

#include "report/figure.h"

namespace gdn::report {

namespace {

const char* const kStyle = R"(:root { color-scheme: light dark; --good: #1b7f3b; --warn: #a15c00; --card: #f5f7f9 }
@media (prefers-color-scheme: dark) { :root { --good: #5fd38a; --warn: #f0b35a; --card: #1a2027 } }
* { box-sizing: border-box } html { background: var(--paper) }
body { margin: 0 auto; padding: 28px 24px 56px; max-width: 1080px; color: var(--ink); background: var(--paper);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; overflow-wrap: anywhere }
h1 { margin: 0; font-size: 26px; line-height: 1.2 } .subtitle { margin: 4px 0 20px; color: var(--muted) }
h2 { margin: 34px 0 10px; font-size: 18px; line-height: 1.3 } p { margin: 4px 0 } .dim { color: var(--muted); font-size: 14px }
.good { color: var(--good) } .warn { color: var(--warn) } .bad { color: var(--bad) } .strong { font-weight: 600 }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin: 0 0 8px }
.card { padding: 12px 14px; border: 1px solid var(--line); border-radius: 10px; background: var(--card) }
.card b { display: block; font-size: 21px; line-height: 1.25; font-variant-numeric: tabular-nums } .card span { color: var(--muted); font-size: 13px }
figure { margin: 18px 0 8px } figcaption { margin-top: 6px; color: var(--muted); font-size: 13.5px }
.scroll { overflow-x: auto; margin: 8px 0 } table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums }
th { text-align: left; font-weight: 600; color: var(--muted); border-bottom: 1px solid var(--muted); padding: 5px 10px 5px 0; white-space: nowrap }
td { border-bottom: 1px solid var(--line); padding: 5px 10px 5px 0; vertical-align: top; overflow-wrap: normal; min-width: 3em }
th.right, td.right { text-align: right; white-space: nowrap } th:last-child, td:last-child { padding-right: 0 }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 18px; margin: 8px 0 } dt { color: var(--muted) } dd { margin: 0; min-width: 0 }
pre { margin: 6px 0; padding: 10px 12px; overflow-x: auto; border-radius: 8px; background: var(--card); border: 1px solid var(--line); font-size: 13px;
  white-space: pre-wrap } ul { margin: 6px 0; padding-left: 20px } li { margin: 3px 0 } footer { margin-top: 40px; color: var(--muted); font-size: 13px }
@media (max-width: 560px) { body { padding: 20px 14px 40px } dl { grid-template-columns: 1fr } dt { margin-top: 6px }
  .wide { overflow-x: auto } .wide svg.figure { min-width: 680px } }
@media print { :root { color-scheme: light; --good: #1b7f3b; --warn: #a15c00; --card: #ffffff } body { max-width: none; padding: 0; font-size: 11pt }
  figure, table, .card { break-inside: avoid } h2 { break-after: avoid } .scroll { overflow: visible } svg.figure, .card { print-color-adjust: exact; -webkit-print-color-adjust: exact } }
)";

const char* class_of(Tone tone) {
  switch (tone) {
  case Tone::Good: return "good";
  case Tone::Warn: return "warn";
  case Tone::Bad: return "bad";
  case Tone::Dim: return "dim";
  case Tone::Strong: return "strong";
  case Tone::Plain: break;
  }
  return "";
}

std::string open(const char* tag, const std::string& classes) {
  return classes.empty() ? fmt::format("<{}>", tag) : fmt::format("<{} class=\"{}\">", tag, classes);
}

class HtmlRenderer {
public:
  std::string run(const Document& d) {
    for (const Block& b : d.blocks) std::visit([&](const auto& block) { render(block); }, b);
    close();
    return std::move(out_);
  }

private:
  // Lines that follow one another as bullets or to paste are one list, one box.
  enum class Open { None, List, Box };

  void close() {
    if (open_ == Open::List) out_ += "</ul>\n";
    if (open_ == Open::Box) out_ += "</pre>\n";
    open_ = Open::None;
  }
  void want(Open what) {
    if (open_ == what) return;
    close();
    if (what == Open::List) out_ += "<ul>\n";
    if (what == Open::Box) out_ += "<pre>";
    open_ = what;
  }

  void render(const Heading& h) {
    close();
    out_ += fmt::format("<h2>{}</h2>\n", escaped(h.text));
  }
  void render(const Line& l) {
    if (l.verbatim) {
      want(Open::Box);
      out_ += escaped(l.text) + "\n";
    } else if (l.text.rfind("- ", 0) == 0) {
      want(Open::List);
      out_ += open("li", class_of(l.tone)) + escaped(l.text.substr(2)) + "</li>\n";
    } else {
      close();
      out_ += open("p", class_of(l.tone)) + escaped(l.text) + "</p>\n";
    }
  }
  void render(const Pairs& p) {
    close();
    out_ += "<dl>\n";
    for (const auto& [k, v] : p.rows) out_ += fmt::format("<dt>{}</dt><dd>{}</dd>\n", escaped(k), escaped(v));
    out_ += "</dl>\n";
  }
  void render(const Table& t) {
    close();
    out_ += "<div class=\"scroll\"><table>\n<thead><tr>";
    for (const Column& c : t.columns) out_ += open("th", c.align == Align::Right ? "right" : "") + escaped(c.title) + "</th>";
    out_ += "</tr></thead>\n<tbody>\n";
    for (const auto& row : t.rows) {
      out_ += "<tr>";
      for (size_t c = 0; c < row.size(); ++c) {
        std::string classes = t.columns[c].align == Align::Right ? "right" : "";
        if (const char* tone = class_of(row[c].tone); *tone) classes += (classes.empty() ? "" : " ") + std::string(tone);
        out_ += open("td", classes) + escaped(row[c].text) + "</td>";
      }
      out_ += "</tr>\n";
    }
    out_ += "</tbody></table></div>\n";
  }
  void render(const Figure& f) {
    close();
    out_ += fmt::format("<figure><div class=\"wide\">{}</div><figcaption>{}</figcaption></figure>\n", f.svg, escaped(f.caption));
  }

  Open open_ = Open::None;
  std::string out_;
};

} // namespace

std::string render_html(const Page& p) {
  std::string cards;
  for (const Card& c : p.cards)
    cards += fmt::format("<div class=\"card\">{}{}</b><span>{}</span></div>\n", open("b", class_of(c.tone)), escaped(c.value), escaped(c.label));
  return fmt::format("<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
                     "<title>{0}</title>\n<style>\n{1}{2}</style>\n</head>\n<body>\n<h1>{0}</h1>\n<p class=\"subtitle\">{3}</p>\n"
                     "<div class=\"cards\">\n{4}</div>\n{5}</body>\n</html>\n",
                     escaped(p.title), figure_style(), kStyle, escaped(p.subtitle), cards, HtmlRenderer().run(p.body));
}

} // namespace gdn::report
