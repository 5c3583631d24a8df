// Host memory made known to the driver: only such memory is copied asynchronously, at full rate.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace dcpx::device {

constexpr std::uint64_t kPinPieceBytes = std::uint64_t{1}
                                         << 30;  // some kernels refuse more at once

// Registers [data, data + nbytes) with the driver, for all its devices, in pieces of at most
// kPinPieceBytes; takes it back in the destructor, which must run before the memory goes. Where
// the driver or a limit refuses, the memory stays pageable: copies are then slower and as right,
// and the first refusal of the process leaves a warning. Never throws. Movable; other calls are
// thread-safe.
class Pinned {
 public:
  Pinned() noexcept;  // nothing
  // Registers before it returns. `device`: in whose context. REQUIRES: page-aligned memory that
  // nobody else registers.
  static Pinned try_pin(void* data, std::uint64_t nbytes, int device);
  // Registers on a thread of its own, which ends by itself; the memory may be used meanwhile.
  static Pinned start(void* data, std::uint64_t nbytes, int device);
  Pinned(Pinned&& other) noexcept;
  Pinned& operator=(Pinned&& other) noexcept;
  ~Pinned();  // Stops a registration that still runs, after its current piece.

  explicit operator bool() const noexcept { return is_pinned(); }
  bool is_pinned() const noexcept;              // all of it
  std::uint64_t pinned_bytes() const noexcept;  // so far
  void wait() const;                            // until the thread of start() has ended

 private:
  struct State;
  explicit Pinned(std::unique_ptr<State> state) noexcept;
  static Pinned prepare(void* data, std::uint64_t nbytes, int device);
  std::unique_ptr<State> state_;
};

// Whether all of [address, address + nbytes) lies in memory that a Pinned holds registered.
bool is_pinned_range(std::uint64_t address, std::uint64_t nbytes) noexcept;
// How many of the `nbytes` from `address` on a copy may take at once: up to where a registered
// piece ends or begins, or is about to. `is_pinned` tells of which kind they are.
std::uint64_t pin_run_bytes(std::uint64_t address, std::uint64_t nbytes, bool& is_pinned) noexcept;

// Whether some of the range lies where the driver, as a device was lost, still holds a registration
// whose memory is gone: no copy may name it.
bool is_stale_range(std::uint64_t address, std::uint64_t nbytes) noexcept;
void release_stale() noexcept;  // tries to take such registrations back; every new one does

// The kept warning, once; empty where there is none or it was taken.
std::string take_warning();
void forget_warnings();  // for tests: the next refusal warns again

}  // namespace dcpx::device
