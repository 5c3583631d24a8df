// The control functions: failures on demand, counts and reports.
#include <algorithm>
#include <cstring>
#include <sstream>

#include "fake_cuda.h"
#include "world.h"

using namespace fake;

namespace {

std::size_t put(const std::string& all, char* text, std::size_t nbytes) {
  if (nbytes > 0) {
    const std::size_t kept = std::min(all.size(), nbytes - 1);
    std::memcpy(text, all.data(), kept);
    text[kept] = '\0';
  }
  return all.size() + 1;
}

std::size_t put_lines(const std::vector<std::string>& lines, char* text, std::size_t nbytes) {
  std::string all;
  for (const std::string& line : lines) all += line + "\n";
  return put(all, text, nbytes);
}

std::map<std::string, std::int64_t> all_counts() {
  const World& w = world();
  std::map<std::string, std::int64_t> all = w.calls;
  all.insert(w.totals.begin(), w.totals.end());
  const auto is_tests = [](const auto& entry) { return entry.second->is_tests; };
  const auto is_drivers = [](const auto& entry) { return entry.second.is_drivers; };
  const auto tests_streams = std::count_if(w.streams.begin(), w.streams.end(), is_tests);
  const auto& allocations = w.memory.allocations();
  const auto drivers = std::count_if(allocations.begin(), allocations.end(), is_drivers);
  all["live_streams"] = std::int64_t(w.streams.size()) - tests_streams;
  all["live_caller_streams"] = tests_streams;
  all["live_events"] = std::int64_t(w.events.size());
  all["live_modules"] = std::int64_t(w.modules.size());
  all["live_registrations"] = std::int64_t(w.memory.registrations().size());
  all["live_allocations"] = std::int64_t(allocations.size()) - drivers;
  all["live_driver_allocations"] = drivers;
  all["pinned_bytes"] = std::int64_t(w.memory.pinned_bytes);
  all["pinned_peak_bytes"] = std::int64_t(w.memory.pinned_peak_bytes);
  all["device_bytes"] = std::int64_t(w.memory.device_bytes);
  all["device_peak_bytes"] = std::int64_t(w.memory.device_peak_bytes);
  for (const DeviceState& device : w.devices) all["retained_contexts"] += device.retained;
  return all;
}

}  // namespace

FAKE_EXPORT int fake_fail(const char* entry, std::int64_t nth, int code, int is_sticky) {
  const auto lock = locked();
  const std::vector<std::string>& names = entry_points();
  if (nth < 1 || std::find(names.begin(), names.end(), entry) == names.end()) return kNotFound;
  world().failures.push_back({entry, nth, code, is_sticky != 0});
  return kSuccess;
}

FAKE_EXPORT void fake_clear_failures() {
  const auto lock = locked();
  world().failures.clear();
}

FAKE_EXPORT void fake_refuse_fatbin(int is_refused) {
  const auto lock = locked();
  world().settings.refuses_fatbin = is_refused != 0;
}

FAKE_EXPORT void fake_lose_device(int device, int code, std::int64_t works) {
  const auto lock = locked();
  if (device < 0 || device >= kMaxDevices) return;
  if (works <= 0) return lose_device(device, code);
  world().devices[device].runs_left = works;
  world().devices[device].lost_then = code;
}

FAKE_EXPORT std::size_t fake_counts(char* text, std::size_t nbytes) {
  const auto lock = locked();
  std::ostringstream lines;
  for (const auto& [name, value] : all_counts()) lines << name << ' ' << value << '\n';
  return put(lines.str(), text, nbytes);
}

FAKE_EXPORT std::int64_t fake_count(const char* name) {
  const auto lock = locked();
  const auto all = all_counts();
  const auto found = all.find(name);
  return found == all.end() ? 0 : found->second;
}

FAKE_EXPORT std::size_t fake_reports(char* text, std::size_t nbytes) {
  const auto lock = locked();
  return put_lines(world().reports, text, nbytes);
}

FAKE_EXPORT std::size_t fake_notes(char* text, std::size_t nbytes) {
  const auto lock = locked();
  return put_lines(world().notes, text, nbytes);
}

FAKE_EXPORT std::size_t fake_entry_points(char* text, std::size_t nbytes) {
  return put_lines(entry_points(), text, nbytes);
}

FAKE_EXPORT void fake_clear_reports() {
  const auto lock = locked();
  world().reports.clear();
  world().notes.clear();
}

FAKE_EXPORT void fake_clear_counts() {
  const auto lock = locked();
  World& w = world();
  w.calls.clear();
  w.totals.clear();
  w.memory.pinned_peak_bytes = w.memory.pinned_bytes;
  w.memory.device_peak_bytes = w.memory.device_bytes;
}

FAKE_EXPORT int fake_context_depth() { return int(context_stack().size()); }
FAKE_EXPORT int fake_capture_mode() { return capture_mode(); }
