// The C++ tests' harness: TEST registers a case, CHECK* end it with file and line.
#pragma once

#include <cstddef>
#include <fstream>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/error.h"

namespace check {

struct Case {
  const char* name;
  void (*run)();
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

struct Register {
  Register(const char* name, void (*run)()) { cases().push_back({name, run}); }
};

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  throw std::runtime_error(std::string(file) + ":" + std::to_string(line) + ": " + what);
}

template <typename A, typename B>
void equal(const A& a, const B& b, const char* file, int line, const char* text) {
  if (a == b) return;
  std::ostringstream message;
  message << text << ": " << a << " != " << b;
  fail(file, line, message.str());
}

// DCPX_CORPUS is the folder tests/cpp/corpus, given by the Makefile.
inline std::vector<std::byte> corpus(const std::string& name) {
  std::ifstream file(std::string(DCPX_CORPUS) + "/" + name, std::ios::binary);
  if (!file) throw std::runtime_error("no corpus file " + name);
  const std::vector<char> raw{std::istreambuf_iterator<char>(file), {}};
  const auto* first = reinterpret_cast<const std::byte*>(raw.data());
  return {first, first + raw.size()};
}

}  // namespace check

#define TEST(name)                                           \
  static void name();                                        \
  static const check::Register register_##name(#name, name); \
  static void name()

#define CHECK(condition) \
  if (!(condition)) check::fail(__FILE__, __LINE__, #condition)

#define CHECK_EQ(a, b) check::equal((a), (b), __FILE__, __LINE__, #a " == " #b)

#define CHECK_THROWS(expression, wanted)                                            \
  do {                                                                              \
    bool has_thrown = false;                                                        \
    try {                                                                           \
      static_cast<void>(expression);                                                \
    } catch (const dcpx::Error& error) {                                            \
      has_thrown = true;                                                            \
      if (error.code() != (wanted)) check::fail(__FILE__, __LINE__, error.what());  \
    }                                                                               \
    if (!has_thrown) check::fail(__FILE__, __LINE__, #expression " threw nothing"); \
  } while (false)
