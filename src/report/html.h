#pragma once
#include <string>
#include <vector>

#include "report/document.h"

namespace gdn::report {

// One large figure at the head of a page: "104.97 GiB", "allocated peak".
struct Card {
  std::string value, label;
  Tone tone = Tone::Plain;
};

struct Page {
  std::string title, subtitle;
  std::vector<Card> cards = {};
  Document body = {};
};

// One self-contained file: no script, no network; light, dark and on paper; wide tables scroll alone.
std::string render_html(const Page& page);

} // namespace gdn::report
