#include "address_space.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace fake {

namespace {

std::uint64_t rounded(std::uint64_t nbytes) {
  return (std::max<std::uint64_t>(nbytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
}

std::byte* map_addresses(int protection) {
  void* range =
      ::mmap(nullptr, kArenaBytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) return nullptr;
  ::madvise(range, kArenaBytes, MADV_DONTFORK);
  return static_cast<std::byte*>(range);
}

}  // namespace

int Memory::device_of(Address address) const noexcept {
  for (int device = 0; device < kMaxDevices; ++device) {
    const Arena& arena = arenas_[device];
    if (arena.base != 0 && address >= arena.base && address - arena.base < kArenaBytes)
      return device;
  }
  return -1;
}

std::byte* Memory::view(Address address) const noexcept {
  const int device = device_of(address);
  if (device < 0) return reinterpret_cast<std::byte*>(address);
  return arenas_[device].view + (address - arenas_[device].base);
}

Address Memory::allocate(int device, std::uint64_t nbytes, bool is_drivers, bool is_adjacent) {
  Arena& arena = arenas_[device];
  if (arena.base == 0) {
    std::byte* untouchable = map_addresses(PROT_NONE);
    arena.view = map_addresses(PROT_READ | PROT_WRITE);
    if (untouchable == nullptr || arena.view == nullptr) return 0;
    arena.base = reinterpret_cast<Address>(untouchable);
  }
  const std::uint64_t size = rounded(nbytes);
  Address address = 0;
  auto freed = freed_.find({device, size});
  if (freed != freed_.end() && !freed->second.empty() && !is_adjacent) {
    address = freed->second.back();
    freed->second.pop_back();
  } else {
    const std::uint64_t gap = is_adjacent ? 0 : kAlignment;
    if (arena.used_bytes + gap + size > kArenaBytes) return 0;
    address = arena.base + arena.used_bytes + gap;
    arena.used_bytes += gap + size;
  }
  const std::uint64_t id = next_id_++;
  allocations_[address] = {id, device, address, nbytes, is_drivers};
  addresses_[id] = address;
  device_bytes += nbytes;
  device_peak_bytes = std::max(device_peak_bytes, device_bytes);
  return address;
}

bool Memory::free(Address address) {
  const auto found = allocations_.find(address);
  if (found == allocations_.end()) return false;
  const Allocation& allocation = found->second;
  release_pages(allocation);
  freed_[{allocation.device, rounded(allocation.nbytes)}].push_back(address);
  device_bytes -= allocation.nbytes;
  addresses_.erase(allocation.id);
  allocations_.erase(found);
  return true;
}

std::size_t Memory::free_all() {
  std::vector<Address> mine;
  for (const auto& [address, allocation] : allocations_)
    if (!allocation.is_drivers) mine.push_back(address);
  for (const Address address : mine) free(address);
  for (int device = 0; device < kMaxDevices; ++device) {
    const bool is_empty =
        std::none_of(allocations_.begin(), allocations_.end(),
                     [&](const auto& entry) { return entry.second.device == device; });
    if (is_empty) arenas_[device].used_bytes = 0;
    if (is_empty)
      for (auto& [key, list] : freed_)
        if (key.first == device) list.clear();
  }
  return mine.size();
}

// What is read after the free is zeros, or what the next owner wrote.
void Memory::release_pages(const Allocation& allocation) const noexcept {
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  std::byte* first = view(allocation.address);
  const auto start = (reinterpret_cast<std::uint64_t>(first) + page - 1) / page * page;
  const auto end = (reinterpret_cast<std::uint64_t>(first) + allocation.nbytes) / page * page;
  if (start < end) ::madvise(reinterpret_cast<void*>(start), end - start, MADV_DONTNEED);
}

const Allocation* Memory::find(Address address) const noexcept {
  auto next = allocations_.upper_bound(address);
  if (next == allocations_.begin()) return nullptr;
  const Allocation& allocation = (--next)->second;
  const std::uint64_t size = std::max<std::uint64_t>(allocation.nbytes, 1);
  return address - allocation.address < size ? &allocation : nullptr;
}

const Allocation* Memory::by_id(std::uint64_t id) const noexcept {
  const auto found = addresses_.find(id);
  return found == addresses_.end() ? nullptr : &allocations_.at(found->second);
}

bool Memory::was_freed(Address address) const noexcept {
  const int device = device_of(address);
  if (device < 0 || find(address) != nullptr) return false;
  for (const auto& [key, list] : freed_) {
    if (key.first != device) continue;
    for (const Address start : list)
      if (address >= start && address - start < key.second) return true;
  }
  return false;
}

Result Memory::add(const Registration& registration) {
  const Address end = registration.address + registration.nbytes;
  auto next = registrations_.lower_bound(registration.address);
  if (next != registrations_.end() && next->first < end) return kAlreadyRegistered;
  if (next != registrations_.begin()) {
    const Registration& before = std::prev(next)->second;
    if (before.address + before.nbytes > registration.address) return kAlreadyRegistered;
  }
  registrations_[registration.address] = registration;
  pinned_bytes += registration.nbytes;
  pinned_peak_bytes = std::max(pinned_peak_bytes, pinned_bytes);
  return kSuccess;
}

bool Memory::remove(Address address) {
  const auto found = registrations_.find(address);
  if (found == registrations_.end()) return false;
  pinned_bytes -= found->second.nbytes;
  registrations_.erase(found);
  return true;
}

const Registration* Memory::registration_of(Address address) const noexcept {
  auto next = registrations_.upper_bound(address);
  if (next == registrations_.begin()) return nullptr;
  const Registration& found = (--next)->second;
  return address - found.address < found.nbytes ? &found : nullptr;
}

bool Memory::is_pinned(Address address, std::uint64_t nbytes, int device,
                       int& pieces) const noexcept {
  pieces = 0;
  const Address end = address + nbytes;
  while (address < end) {
    const Registration* found = registration_of(address);
    if (found == nullptr) return false;
    if (device >= 0 && !found->is_portable && found->device != device) return false;
    address = found->address + found->nbytes;
    ++pieces;
  }
  return true;
}

bool is_mapped(Address address, std::uint64_t nbytes) noexcept {
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  unsigned char residency = 0;
  const Address first = address / page * page;
  const Address last = (address + std::max<std::uint64_t>(nbytes, 1) - 1) / page * page;
  return ::mincore(reinterpret_cast<void*>(first), page, &residency) == 0 &&
         ::mincore(reinterpret_cast<void*>(last), page, &residency) == 0;
}

}  // namespace fake
