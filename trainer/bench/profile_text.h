#pragma once
#include <functional>
#include <string>
#include <vector>

#include "config/hardware.h"

// Rows put into the text of a hardware file, so that its other lines and comments stay.
namespace gdn::trainer::bench {

// `text` with `lines` behind the last row of the list under the top-level key `section`, less the rows there that
// `replaced` names; a row stands on a line of its own.
std::string with_rows(const std::string& text, const std::string& section, const std::vector<std::string>& lines,
                      const std::function<bool(const std::string& line)>& replaced);

// `candidate` where it reads as `wanted`, else `wanted` written anew: the file has its rows in another form.
std::string text_of(const std::string& candidate, const config::Hardware& wanted, const std::string& file);

} // namespace gdn::trainer::bench
