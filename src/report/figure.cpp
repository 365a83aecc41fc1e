#include "report/figure.h"

#include <algorithm>
#include <cmath>

#include <fmt/core.h>

namespace gdn::report {

namespace {

constexpr double kWidth = 960, kLeft = 58, kRight = 18, kTop = 30;
constexpr double kInner = kWidth - kLeft - kRight;

// About `count` round steps over [0, top].
double round_step(double top, int count) {
  const double raw = top / count, power = std::pow(10.0, std::floor(std::log10(std::max(raw, 1e-12))));
  for (double m : {1.0, 2.0, 2.5, 5.0, 10.0})
    if (raw <= m * power) return m * power;
  return 10 * power;
}

std::string number(double v) {
  std::string s = fmt::format("{:.1f}", v);
  while (s.back() == '0') s.pop_back();
  if (s.back() == '.') s.pop_back();
  return s == "-0" ? "0" : s;
}

// "1,250" or "0.25": as many digits as a tick needs.
std::string tick(double v, double step) {
  if (step < 1) return fmt::format("{:.{}f}", v, step < 0.1 ? 2 : 1);
  std::string digits = fmt::format("{:.0f}", v);
  for (int at = static_cast<int>(digits.size()) - 3; at > 0; at -= 3) digits.insert(static_cast<size_t>(at), ",");
  return digits;
}

std::string open(const std::string& title, double height) {
  return fmt::format("<svg class=\"figure\" xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{}\">\n"
                     "<title>{}</title>\n", number(kWidth), number(height), escaped(title), escaped(title));
}

std::string text(double x, double y, const char* anchor, const char* kind, const std::string& what) {
  return fmt::format("<text class=\"{}\" x=\"{}\" y=\"{}\" text-anchor=\"{}\">{}</text>\n", kind, number(x), number(y), anchor, escaped(what));
}

std::string line(double x1, double y1, double x2, double y2, const char* kind) {
  return fmt::format("<line class=\"{}\" x1=\"{}\" y1=\"{}\" x2=\"{}\" y2=\"{}\"/>\n", kind, number(x1), number(y1), number(x2), number(y2));
}

double text_width(const std::string& s, double size) { return 0.56 * size * static_cast<double>(s.size()); }

// A label with a plate behind it, kept inside the figure.
std::string plate(double x, double y, const std::string& what) {
  const double w = text_width(what, 14.5) + 16;
  const double left = std::clamp(x - w / 2, kLeft, kWidth - kRight - w);
  return fmt::format("<rect class=\"plate\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"22\" rx=\"5\"/>\n", number(left), number(y - 15), number(w)) +
         text(left + w / 2, y, "middle", "mark", what);
}

} // namespace

std::string escaped(const std::string& raw) {
  std::string out;
  for (char c : raw) {
    switch (c) {
    case '&': out += "&amp;"; break;
    case '<': out += "&lt;"; break;
    case '>': out += "&gt;"; break;
    case '"': out += "&quot;"; break;
    default: out += c;
    }
  }
  return out;
}

std::string area_chart(const AreaChart& c) {
  constexpr double kPlot = 300, kBottom = kTop + kPlot;
  const size_t columns = c.bands.empty() ? 0 : c.bands.front().values.size();
  std::vector<double> level(columns, 0);
  double top = c.limit;
  for (const Band& b : c.bands)
    for (size_t i = 0; i < columns; ++i) top = std::max(top, level[i] += b.values[i]);
  const double step = round_step(top * 1.04, 5);
  top = std::ceil(top * 1.04 / step) * step;
  auto x = [&](size_t i) { return kLeft + kInner * (columns > 1 ? static_cast<double>(i) / static_cast<double>(columns - 1) : 0); };
  auto y = [&](double v) { return kBottom - kPlot * v / top; };

  // The legend under the figure, in as many rows as it takes.
  std::string legend;
  double at = kLeft, row = kBottom + 66;
  for (const Band& b : c.bands) {
    const double w = 26 + text_width(b.name, 13);
    if (at + w > kWidth - kRight) at = kLeft, row += 22;
    legend += fmt::format("<rect class=\"{}\" x=\"{}\" y=\"{}\" width=\"12\" height=\"12\" rx=\"2\"/>\n", b.colour, number(at), number(row - 10));
    legend += text(at + 18, row, "start", "label", b.name);
    at += w + 10;
  }
  std::string out = open(c.title, row + 14);
  for (double v = 0; v <= top * 1.0001; v += step) {
    out += line(kLeft, y(v), kWidth - kRight, y(v), v > 0 ? "grid" : "axis");
    out += text(kLeft - 8, y(v) + 4, "end", "tick", tick(v, step));
  }
  out += text(kLeft - 8, kTop - 14, "end", "tick", c.y_unit);
  std::vector<double> floor(columns, 0);
  for (const Band& b : c.bands) {
    // Points on a level stretch say nothing.
    std::vector<double> roof(columns);
    for (size_t i = 0; i < columns; ++i) roof[i] = floor[i] + b.values[i];
    auto turns = [&](const std::vector<double>& v, size_t i) { return i == 0 || i + 1 == columns || v[i] != v[i - 1] || v[i] != v[i + 1]; };
    std::string path;
    for (size_t i = 0; i < columns; ++i)
      if (turns(roof, i)) path += fmt::format("{}{} {}", path.empty() ? "M" : "L", number(x(i)), number(y(roof[i])));
    for (size_t i = columns; i-- > 0;)
      if (turns(floor, i)) path += fmt::format("L{} {}", number(x(i)), number(y(floor[i])));
    out += fmt::format("<path class=\"{}\" d=\"{}Z\"><title>{}</title></path>\n", b.colour, path, escaped(b.name));
    floor = std::move(roof);
  }
  const double x_step = round_step(c.x_end, 8);
  for (double v = 0; v <= c.x_end; v += x_step) {
    const double px = kLeft + kInner * v / std::max(c.x_end, 1e-12);
    out += text(px, kBottom + 34, "middle", "tick", tick(v, x_step));
  }
  out += text(kWidth - kRight, kBottom + 48, "end", "tick", c.x_unit);
  for (const Stretch& s : c.strip) {
    const double a = kLeft + kInner * s.from / c.x_end, b = kLeft + kInner * s.to / c.x_end;
    out += fmt::format("<rect class=\"pass-{}\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"8\"><title>{}</title></rect>\n", s.kind, number(a),
                       number(kBottom + 6), number(std::max(0.3, b - a)), escaped(s.kind));
  }
  if (c.limit > 0) {
    out += line(kLeft, y(c.limit), kWidth - kRight, y(c.limit), "limit");
    out += text(kWidth - kRight, y(c.limit) - 6, "end", "limit-text", c.limit_text);
  }
  if (c.mark >= 0) {
    const size_t m = static_cast<size_t>(c.mark);
    out += line(x(m), y(level[m]), x(m), kBottom, "mark-line");
    out += fmt::format("<circle class=\"mark-dot\" cx=\"{}\" cy=\"{}\" r=\"5\"/>\n", number(x(m)), number(y(level[m])));
    double label = y(level[m]) - 14;
    if (c.limit > 0 && std::abs(label - y(c.limit)) < 20) label = y(c.limit) + 26; // not over the limit's own text
    out += plate(x(m), std::max(label, kTop + 16), c.mark_text);
  }
  return out + legend + "</svg>\n";
}

std::string dot_chart(const DotChart& c) {
  constexpr double kPlot = 340, kBottom = kTop + kPlot;
  double left = 1e300, right = 0, low = 1e300, high = 0;
  for (const Dot& d : c.dots) {
    left = std::min(left, d.x), right = std::max(right, d.x);
    low = std::min(low, d.y), high = std::max(high, d.y);
  }
  if (c.dots.empty()) left = low = 0, right = high = 1;
  if (c.x_limit > 0) right = std::max(right, c.x_limit), left = std::min(left, c.x_limit);
  auto widen = [](double& a, double& b) {
    const double room = std::max((b - a) * 0.06, b * 0.002);
    a -= room, b += room;
  };
  widen(left, right);
  widen(low, high);
  auto x = [&](double v) { return kLeft + kInner * (v - left) / (right - left); };
  auto y = [&](double v) { return kBottom - kPlot * (v - low) / (high - low); };
  std::string out = open(c.title, kBottom + 56);
  const double y_step = round_step(high - low, 6), x_step = round_step(right - left, 8);
  for (double v = std::ceil(low / y_step) * y_step; v <= high; v += y_step) {
    out += line(kLeft, y(v), kWidth - kRight, y(v), "grid");
    out += text(kLeft - 8, y(v) + 4, "end", "tick", tick(v, y_step));
  }
  for (double v = std::ceil(left / x_step) * x_step; v <= right; v += x_step) {
    out += line(x(v), kTop, x(v), kBottom, "grid");
    out += text(x(v), kBottom + 20, "middle", "tick", tick(v, x_step));
  }
  out += line(kLeft, kBottom, kWidth - kRight, kBottom, "axis");
  out += text(kWidth - kRight, kBottom + 42, "end", "label", c.x_label);
  out += text(kLeft, kTop - 6, "start", "label", c.y_label);
  if (c.x_limit > 0) {
    out += line(x(c.x_limit), kTop, x(c.x_limit), kBottom, "limit");
    const bool inside = x(c.x_limit) < kWidth / 2;
    out += text(x(c.x_limit) + (inside ? 6 : -6), kTop + 14, inside ? "start" : "end", "limit-text", c.limit_text);
  }
  std::vector<const Dot*> front;
  for (const Dot& d : c.dots)
    if (d.kind == "front" || d.kind == "chosen") front.push_back(&d);
  std::sort(front.begin(), front.end(), [](const Dot* a, const Dot* b) { return a->x < b->x; });
  std::string path;
  for (size_t i = 0; i < front.size(); ++i) { // a step: until the next point is affordable, this one stands
    if (i == 0) path += fmt::format("M{} {}", number(x(front[i]->x)), number(y(front[i]->y)));
    else path += fmt::format("H{}V{}", number(x(front[i]->x)), number(y(front[i]->y)));
  }
  if (!path.empty()) out += fmt::format("<path class=\"front-line\" d=\"{}\"/>\n", path);
  for (const char* kind : {"over", "dominated", "front", "chosen"})
    for (const Dot& d : c.dots)
      if (d.kind == kind)
        out += fmt::format("<circle class=\"dot-{}\" cx=\"{}\" cy=\"{}\" r=\"{}\"><title>{}</title></circle>\n", kind, number(x(d.x)), number(y(d.y)),
                           d.kind == "dominated" || d.kind == "over" ? "3.5" : "5.5", escaped(d.label));
  // Names above the front, where nothing lies: to the left of their dot.
  struct Box { double left, right, y; };
  std::vector<Box> taken;
  for (const Dot& d : c.dots) {
    if (!d.named) continue;
    const double w = text_width(d.label, d.kind == "chosen" ? 14.5 : 13), py = y(d.y) - 8;
    const bool over = x(d.x) - 10 - w < kLeft;
    if (over && d.kind != "chosen") continue;
    const double px = over ? std::max(x(d.x) - 4, kLeft + 4) : x(d.x) - 10;
    const Box box{over ? px : px - w, over ? px + w : px, py};
    const bool clash = std::any_of(taken.begin(), taken.end(), [&](const Box& t) {
      return std::abs(t.y - box.y) < 17 && t.left < box.right + 6 && box.left < t.right + 6;
    });
    if (clash && d.kind != "chosen") continue;
    taken.push_back(box);
    out += text(px, py, over ? "start" : "end", d.kind == "chosen" ? "mark" : "label", d.label);
  }
  return out + "</svg>\n";
}

const char* figure_style() {
  return R"(:root, svg.figure { --paper: #ffffff; --ink: #1b1f24; --muted: #5b6672; --line: #d9dee3; --plate: #ffffffe6; --accent: #0b6bcb;
  --bad: #c62828; --parameters: #35618f; --gradients: #5f8fbf; --optimizer: #9dbfdf; --activations: #f0932b; --transient: #d9534f;
  --logits: #8e5ea2; --workspace: #d8b427; --communication: #4f9d69; --context: #8b949e; --allocator: #c3c9cf;
  --forward: #7fb3e6; --backward: #35618f; --replay: #d9534f; --loss: #8e5ea2 }
@media (prefers-color-scheme: dark) { :root, svg.figure { --paper: #12161b; --ink: #e6e9ec; --muted: #9aa5b1; --line: #2b333c;
  --plate: #12161be6; --accent: #6cb2ff; --bad: #ff6b6b; --parameters: #4b7fb5; --gradients: #7aa8d6; --optimizer: #b4d0ea;
  --context: #6d7680; --allocator: #4a525b; --backward: #4b7fb5 } }
@media print { :root, svg.figure { --paper: #ffffff; --ink: #000000; --muted: #444444; --line: #cccccc; --plate: #ffffff; --accent: #0b6bcb;
  --bad: #c62828; --parameters: #35618f; --gradients: #5f8fbf; --optimizer: #9dbfdf; --context: #8b949e; --allocator: #c3c9cf } }
svg.figure { display: block; width: 100%; height: auto; font-family: system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; background: var(--paper) }
.figure text { fill: var(--ink); font-size: 13px } .figure .tick { fill: var(--muted); font-size: 12px }
.figure .mark { font-weight: 600 } .figure .limit-text { fill: var(--bad); font-size: 12px }
.figure .grid { stroke: var(--line); stroke-width: 1 } .figure .axis { stroke: var(--muted); stroke-width: 1 }
.figure .limit { stroke: var(--bad); stroke-width: 1.5; stroke-dasharray: 6 4 } .figure .mark-line { stroke: var(--ink); stroke-width: 1; stroke-dasharray: 3 3 }
.figure .mark-dot { fill: var(--ink); stroke: var(--paper); stroke-width: 2 } .figure .plate { fill: var(--plate); stroke: var(--line) }
.figure .front-line { fill: none; stroke: var(--accent); stroke-width: 1.5; opacity: .6 }
.figure .dot-front { fill: var(--accent); stroke: var(--paper); stroke-width: 1.5 } .figure .dot-dominated { fill: var(--muted); opacity: .45 }
.figure .dot-over { fill: var(--bad); opacity: .4 } .figure .dot-chosen { fill: var(--activations); stroke: var(--ink); stroke-width: 2 }
.figure .parameters { fill: var(--parameters) } .figure .gradients { fill: var(--gradients) } .figure .optimizer { fill: var(--optimizer) }
.figure .activations { fill: var(--activations) } .figure .transient { fill: var(--transient) } .figure .logits { fill: var(--logits) }
.figure .workspace { fill: var(--workspace) } .figure .communication { fill: var(--communication) } .figure .context { fill: var(--context) }
.figure .allocator { fill: var(--allocator) } .figure .pass-forward { fill: var(--forward) } .figure .pass-backward { fill: var(--backward) }
.figure .pass-replay { fill: var(--replay) } .figure .pass-loss { fill: var(--loss) }
)";
}

std::string standalone(const std::string& figure) {
  const size_t at = figure.find("<title>");
  return figure.substr(0, at) + "<style>" + figure_style() + "</style>\n" + figure.substr(at);
}

} // namespace gdn::report
