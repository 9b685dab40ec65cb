#pragma once

#include "load_store.cuh"
#include "norm_statistics.h"

/// Shared by the kernels for channels-last images: the division of a matrix among threads,
/// and accesses of 16 bytes. Tested by tests/ops/norm_act_test.cpp.
namespace reprise::detail::kernels {

constexpr int kRowThreads = RowsShape::kThreads;

/// Elements of a memory access of 16 bytes.
template <class T>
constexpr int kVector = 16 / sizeof(T);

template <class T>
__device__ void unpack(const uint4& bits, float (&v)[kVector<T>]) {
  if constexpr (sizeof(T) == 4) {
    v[0] = __uint_as_float(bits.x);
    v[1] = __uint_as_float(bits.y);
    v[2] = __uint_as_float(bits.z);
    v[3] = __uint_as_float(bits.w);
  } else {
    const Eight<T> eight{bits};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 two = eight.pair(j);
      v[2 * j] = two.x;
      v[2 * j + 1] = two.y;
    }
  }
}

template <class T>
__device__ uint4 pack(const float (&v)[kVector<T>]) {
  if constexpr (sizeof(T) == 4) {
    return make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]),
                      __float_as_uint(v[2]), __float_as_uint(v[3]));
  } else {
    Eight<T> eight;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      eight.set_pair(j, make_float2(v[2 * j], v[2 * j + 1]));
    }
    return eight.bits;
  }
}

/// Division of a matrix among blocks. The rows of an instance are assigned to its `parts`
/// in turn, so that all blocks read neighbouring rows at a time.
struct Tiles {
  int vectors;        // per row
  int column_blocks;  // per row
  int across, down;   // vectors and rows of a block
  int rows;           // of an instance
  int parts;          // of an instance

  int blocks_of_instance() const { return parts * column_blocks; }
  /// Number of rows that belong to a part.
  __host__ __device__ int rows_of_part(int part) const {
    const int turn = parts * down;
    const int rest = rows % turn - part * down;
    return rows / turn * down + (rest < 0 ? 0 : rest > down ? down : rest);
  }
};

inline Tiles tiles_of(const RowsShape& shape, int64_t rows, int64_t parts) {
  return {static_cast<int>(shape.vectors()),
          static_cast<int>(shape.column_blocks()),
          static_cast<int>(shape.vectors_of_block()),
          static_cast<int>(shape.rows_of_block()),
          static_cast<int>(rows),
          static_cast<int>(parts)};
}

/// The vectors of a thread: one column of them, with rows at a constant distance.
struct Place {
  int vector, instance, part;
  int count;  // rows; 0: the thread has none
  int row_of_block;
  int first_row, row_step;  // of the matrix
  int64_t begin, stride;    // index of the first vector in the matrix, and to the next

  __device__ explicit Place(const Tiles& t) {
    const int thread = static_cast<int>(threadIdx.x);
    const int block = static_cast<int>(blockIdx.x);
    row_of_block = thread / t.across;
    vector = block % t.column_blocks * t.across + thread % t.across;
    part = block / t.column_blocks % t.parts;
    instance = block / t.column_blocks / t.parts;
    const int first = part * t.down + row_of_block;
    row_step = t.parts * t.down;
    const bool inside =
        row_of_block < t.down && vector < t.vectors && first < t.rows;
    count = inside ? (t.rows - first + row_step - 1) / row_step : 0;
    first_row = instance * t.rows + first;
    begin = static_cast<int64_t>(first_row) * t.vectors + vector;
    stride = static_cast<int64_t>(row_step) * t.vectors;
  }
  /// Index of the i-th vector in the matrix.
  __device__ int64_t at(int i) const { return begin + i * stride; }
  __device__ int row(int i) const { return first_row + i * row_step; }
  /// Index of the partial result of the thread's first column in the scratch memory.
  template <int kWidth>
  __device__ int64_t scratch_index(const Tiles& t) const {
    const int64_t row = static_cast<int64_t>(instance) * t.parts + part;
    return (row * t.vectors + vector) * kWidth;
  }
};

/// Adds up two values of each column over the rows of the block, and writes them as a
/// partial result. All threads must call this.
template <int kWidth>
__device__ void write_partial_sums(const Tiles& t, const Place& place,
                                   const float (&a)[kWidth],
                                   const float (&b)[kWidth], float2* scratch) {
  __shared__ float2 shared[kWidth][kRowThreads];
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) shared[j][thread] = make_float2(a[j], b[j]);
  for (int n = t.down; n > 1;) {
    const int half = (n + 1) / 2;
    __syncthreads();
    if (place.row_of_block + half < n) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const float2 other = shared[j][thread + half * t.across];
        shared[j][thread].x += other.x;
        shared[j][thread].y += other.y;
      }
    }
    n = half;
  }
  if (place.row_of_block != 0 || place.vector >= t.vectors) return;
  float2* to = scratch + place.scratch_index<kWidth>(t);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) to[j] = shared[j][thread];
}

}  // namespace reprise::detail::kernels
