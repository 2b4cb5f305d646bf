// The tiles of AMX's matrix unit.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace {

struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

// Tile instructions do not tell the compiler which memory they read.
inline void settle() { asm volatile("" ::: "memory"); }

// Eight tiles of 16 rows of 64 bytes.
inline void configure_tiles() {
  TileConfig config;
  for (int t = 0; t < 8; ++t) {
    config.bytes[t] = 64;
    config.rows[t] = 16;
  }
  settle();
  _tile_loadconfig(&config);
}

}  // namespace
