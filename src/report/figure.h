#pragma once
#include <string>
#include <vector>

// Figures as SVG, without a library and without a network: drawn in CSS variables, so that the page
// they stand in (or their own style, alone) gives them the colours of a light page, a dark one or paper.
namespace gdn::report {

// One band of a stacked area.
struct Band {
  std::string name;
  std::string colour;         // of the style's palette: "parameters", "activations", ...
  std::vector<double> values; // one a column
};

// A stretch of the horizontal axis: what ran there.
struct Stretch {
  double from = 0, to = 0; // in units of the axis
  std::string kind;        // "forward", "backward", "replay", ...
};

struct AreaChart {
  std::string title;                // for those who cannot see it
  std::string x_unit, y_unit;       // "ms", "GiB"
  double x_end = 0;                 // columns are spread evenly over [0, x_end]
  std::vector<Band> bands;          // bottom first
  std::vector<Stretch> strip = {};  // under the axis
  int mark = -1;                    // column of the peak; -1: none
  std::string mark_text;
  double limit = 0;                 // a horizontal line; 0: none
  std::string limit_text;
};
std::string area_chart(const AreaChart& chart);

struct Dot {
  double x = 0, y = 0;
  std::string label;   // shown where `named`, else on hover
  std::string kind;    // "front", "dominated", "over", "chosen"
  bool named = false;
};
struct DotChart {
  std::string title;
  std::string x_label, y_label;
  std::vector<Dot> dots;      // those of kind front and chosen are joined by steps
  double x_limit = 0;         // a vertical line; 0: none
  std::string limit_text;
};
std::string dot_chart(const DotChart& chart);

// An SVG file: the figure with its own style, which follows the reader's light or dark mode.
std::string standalone(const std::string& figure);
// The variables and classes figures are drawn in.
const char* figure_style();

std::string escaped(const std::string& text); // for XML and HTML

} // namespace gdn::report
