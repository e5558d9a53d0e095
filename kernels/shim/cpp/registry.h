// What the host side sees of a kernel: its parameters as the compiler knows them, and a way to call it.
#pragma once

#include "dev.cuh"

struct TensorMap;

namespace shim {

struct Entry {
  const char* name;
  const char* file;
  u32 threads;
  const char* parameters;  // such as "in f32, out bf16, u32"
  void (*call)(const u64* arguments);
};
void enter(const Entry& entry);

template <typename T> struct TypeName;
template <> struct TypeName<u8> { static constexpr const char* value = "u8"; };
template <> struct TypeName<u32> { static constexpr const char* value = "u32"; };
template <> struct TypeName<u64> { static constexpr const char* value = "u64"; };
template <> struct TypeName<Address> { static constexpr const char* value = "address"; };
template <> struct TypeName<float> { static constexpr const char* value = "f32"; };
template <> struct TypeName<bf16> { static constexpr const char* value = "bf16"; };
template <> struct TypeName<TensorMap> { static constexpr const char* value = "tiles"; };

template <typename T>
void describe(char* text) {
  if (*text) strcat(text, ", ");
  using Pointee = std::remove_pointer_t<T>;
  if (std::is_pointer_v<T>) strcat(text, std::is_const_v<Pointee> ? "in " : "out ");
  strcat(text, TypeName<std::remove_const_t<Pointee>>::value);
}

// What is larger than its slot lies where that says.
template <typename T>
T argument(u64 bits) {
  T value;
  memcpy(&value, sizeof value > sizeof bits ? reinterpret_cast<const void*>(bits) : &bits, sizeof value);
  return value;
}

template <typename F> struct Signature;
template <typename... P> struct Signature<void(P...)> {
  static const char* parameters() {
    static char text[1024] = "";
    if (!*text) (describe<P>(text), ...);  // kernels share signatures
    return text;
  }
  template <void (*FUNCTION)(P...), size_t... I>
  static void call_with(const u64* arguments, std::index_sequence<I...>) {
    FUNCTION(argument<P>(arguments[I])...);
  }
  template <void (*FUNCTION)(P...)>
  static void call(const u64* arguments) {
    call_with<FUNCTION>(arguments, std::index_sequence_for<P...>{});
  }
};

}  // namespace shim

#define ENTER(name, file) \
  shim::enter({#name, file, name##_threads, shim::Signature<decltype(name)>::parameters(), \
               shim::Signature<decltype(name)>::call<name>})
