// Device memory of the fake, and which host memory is registered.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "abi.h"

namespace fake {

constexpr int kMaxDevices = 8;
constexpr std::uint64_t kArenaBytes = std::uint64_t{64} << 30;  // of addresses, not of memory
constexpr std::uint64_t kAlignment = 512;                       // of allocations, as cuMemAlloc's

struct Allocation {
  std::uint64_t id = 0;  // never used twice, unlike addresses
  int device = 0;
  Address address = 0;
  std::uint64_t nbytes = 0;
  bool is_drivers = false;  // by cuMemAlloc, not by the test
};

struct Registration {
  Address address = 0;
  std::uint64_t nbytes = 0;
  int device = 0;  // of the context that was current
  bool is_portable = false;
};

// Each device is a range of addresses that the CPU cannot touch, and a second view of the same
// size, at other addresses, where the bytes are. Guarded by the world's mutex, but for view().
class Memory {
 public:
  // The device in whose range the address lies, allocated or not; -1: host memory.
  int device_of(Address address) const noexcept;
  // Where the bytes of an address are: itself for host memory. Thread-safe.
  std::byte* view(Address address) const noexcept;

  // `is_adjacent`: without a gap behind the last one. Else no two allocations ever touch. Returns
  // 0 where the device's addresses are used up. Reuses what was freed, as caching allocators do.
  Address allocate(int device, std::uint64_t nbytes, bool is_drivers, bool is_adjacent);
  bool free(Address address);  // false: no allocation begins there
  const Allocation* find(Address address) const noexcept;
  const Allocation* by_id(std::uint64_t id) const noexcept;
  bool was_freed(Address address) const noexcept;  // in a device's range and once allocated
  // Frees all that the test allocated; returns how many there were.
  std::size_t free_all();

  Result add(const Registration& registration);
  bool remove(Address address);
  const Registration* registration_of(Address address) const noexcept;
  // Whether [address, address + nbytes) is registered for a device (-1: any); `pieces` counts
  // the registrations that it lies in.
  bool is_pinned(Address address, std::uint64_t nbytes, int device, int& pieces) const noexcept;

  const std::map<Address, Allocation>& allocations() const noexcept { return allocations_; }
  const std::map<Address, Registration>& registrations() const noexcept { return registrations_; }
  std::uint64_t device_bytes = 0, device_peak_bytes = 0;
  std::uint64_t pinned_bytes = 0, pinned_peak_bytes = 0;

 private:
  struct Arena {
    Address base = 0;  // 0: not made yet
    std::byte* view = nullptr;
    std::uint64_t used_bytes = 0;
  };
  void release_pages(const Allocation& allocation) const noexcept;

  Arena arenas_[kMaxDevices];
  std::uint64_t next_id_ = 1;
  std::map<Address, Allocation> allocations_;
  std::map<std::uint64_t, Address> addresses_;  // by id
  std::map<std::pair<int, std::uint64_t>, std::vector<Address>> freed_;
  std::map<Address, Registration> registrations_;
};

// Whether the pages at both ends of a host range are mapped.
bool is_mapped(Address address, std::uint64_t nbytes) noexcept;

}  // namespace fake
