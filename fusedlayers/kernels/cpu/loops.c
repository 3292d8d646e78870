/* The elementwise steps of a layer, one pass over memory each.

   A tensor is a matrix, contiguous along its columns, as in kernels/triton/tiles.py: a bias runs along the columns
   (dense layers, channels-last tensors) or along the rows (channels-first tensors); without one all of it is one row. A
   pass goes over it in blocks of BLOCK numbers. What lies between two steps of a block stays in the first-level cache, so
   each step is a short loop that compilers vectorise. Blocks are padded at the ends of rows: every number then goes
   through the same instructions, wherever it stands, and so do sums, whatever the number of threads.

   Arithmetic is float32. Functions of 16-bit numbers are tables of all 65,536. "bits" are those of a float32 number. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__F16C__) || defined(__AVX__)
#include <immintrin.h>
#endif

/* Numbers that a task takes: TILE columns of ROWS rows, a PIECE of a long row, or a RUN of short ones in each of PERIODS
   images. */
enum { BLOCK = 256, LANES = 8, TILE = 2048, ROWS = 32, PIECE = 16384, RUN = 4096, PERIODS = 8 };
/* Bytes ahead of which lines are fetched that will be written only. */
enum { AHEAD = 2048 };
#define EACH _Pragma("omp simd") for (int i = 0; i < BLOCK; i++)
#define FIRST_N _Pragma("omp simd") for (int i = 0; i < n; i++)

static inline int32_t bits_of(float x) { int32_t i; memcpy(&i, &x, 4); return i; }
static inline float float_of(int32_t i) { float x; memcpy(&x, &i, 4); return x; }

/* --- what Python fills in: loops.py has the same structures --------------------------------------------------------- */

enum dtype { FLOAT32, BFLOAT16, FLOAT16 };
enum axis { NO_AXIS, ALONG_COLUMNS, ALONG_ROWS };

/* The branch bit of a folded function (derivative/branch_bit.py). */
typedef struct { int32_t is_folded; float position; } mark;

/* The derivative of a monotone function from float32 outputs (value_tables.py): outputs times ``rises`` rise; those from
   ``middle`` on are the upper side, and those there have the derivative ``at_middle``. A side's distances are those from an origin, times a sign. */
typedef struct { float high, low, sign; } side;
typedef struct { float rises, middle, at_middle; side lower, upper; const float *cubics; } table;

/* A function of float32 outputs around a minimum (value_tables.py): the derivative. */
typedef struct {
  float origin_high, origin_low, nearest, tail, down;
  const float *cubics;
} fold_table;

/* The part of a normal distribution below z: cubics about z = i / steps, from i = first to last (loops.py). */
typedef struct { float steps, first, last; const float *cubics; } normal;

typedef struct {
  int32_t dtype, function;
  float parameter;
  int32_t is_from_output; /* whether the derivative is the function's, by a formula from outputs */
  mark mark;
  table table;
  fold_table slope;
  const uint16_t *values; /* 16 bits: the stored output for every input */
  const float *outputs;   /* 16 bits: the same, neither marked nor rounded */
  const float *slopes;    /* 16 bits: the derivative for every saved number, or NULL: by the function */
  normal normal;          /* of gelu */
} kernel;

typedef struct { int64_t count, columns, channels; int32_t axis, threads; } layout;

/* --- 16-bit numbers ------------------------------------------------------------------------------------------------- */

static void widen(int dtype, const uint16_t *h, float *x) {
  if (dtype == BFLOAT16) {
    EACH x[i] = float_of((int32_t)((uint32_t)h[i] << 16));
    return;
  }
#if defined(__F16C__)
  for (int i = 0; i < BLOCK; i += 8) _mm256_storeu_ps(x + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(h + i))));
#elif defined(__FLT16_MAX__)
  const _Float16 *half = (const _Float16 *)h;
  EACH x[i] = (float)half[i];
#else
  EACH { /* The exponent is moved by a multiplication, which subnormal numbers need as well. */
    int32_t magnitude = (h[i] & 0x7fff) << 13;
    float wide = float_of(magnitude) * 0x1p112f;
    wide = magnitude >= 0x0f800000 ? float_of(magnitude + 0x70000000) : wide;
    x[i] = float_of(bits_of(wide) | (int32_t)((uint32_t)(h[i] & 0x8000) << 16));
  }
#endif
}

static void narrow(int dtype, const float *x, uint16_t *h) {
  if (dtype == BFLOAT16) {
    EACH {
      uint32_t u = (uint32_t)bits_of(x[i]), rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
      h[i] = x[i] != x[i] ? (uint16_t)0x7fc0 : (uint16_t)rounded;
    }
    return;
  }
#if defined(__F16C__)
  for (int i = 0; i < BLOCK; i += 8) _mm_storeu_si128((__m128i *)(h + i), _mm256_cvtps_ph(_mm256_loadu_ps(x + i), 0));
#elif defined(__FLT16_MAX__)
  _Float16 *half = (_Float16 *)h;
  EACH half[i] = (_Float16)x[i];
#else
  EACH { /* Rounded to even: by integers, and below 2^-14 by adding 0.5, whose last bit is 2^-24. */
    uint32_t u = (uint32_t)bits_of(x[i]) & 0x7fffffffu, sign = ((uint32_t)bits_of(x[i]) >> 16) & 0x8000u;
    uint32_t normal = (u - 0x38000000u + 0xfffu + ((u >> 13) & 1u)) >> 13;
    uint32_t small = (uint32_t)bits_of(float_of((int32_t)u) + 0.5f) - 0x3f000000u;
    uint32_t large = u > 0x7f800000u ? 0x7e00u : 0x7c00u;
    uint32_t found = u < 0x38800000u ? small : normal;
    h[i] = (uint16_t)((u >= 0x477ff000u ? large : found) | sign);
  }
#endif
}

/* --- cubics --------------------------------------------------------------------------------------------------------- */

#if defined(__AVX__)
/* The first to fourth numbers of four rows of four, in each half of a register. */
static inline void transpose(const __m256 *row, __m256 *c) {
  const __m256 low = _mm256_unpacklo_ps(row[0], row[2]), high = _mm256_unpackhi_ps(row[0], row[2]);
  const __m256 other_low = _mm256_unpacklo_ps(row[1], row[3]), other_high = _mm256_unpackhi_ps(row[1], row[3]);
  c[0] = _mm256_unpacklo_ps(low, other_low), c[1] = _mm256_unpackhi_ps(low, other_low);
  c[2] = _mm256_unpacklo_ps(high, other_high), c[3] = _mm256_unpackhi_ps(high, other_high);
}

static inline __m256 cubic(const __m256 *c, __m256 x) { return c[0] + x * (c[1] + x * (c[2] + x * c[3])); }
#endif

/* Cubics at places in their intervals; ``at[i]`` is where the four coefficients of one begin. */
static void cubics_at(const float *cubics, const int32_t *at, const float *place, float *found) {
#if defined(__AVX__) /* eight at a time, transposed in registers: compilers take them one by one through memory */
  for (int i = 0; i < BLOCK; i += 8) {
    __m256 row[4], c[4];
    for (int j = 0; j < 4; j++)
      row[j] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(cubics + at[i + j])),
                                    _mm_loadu_ps(cubics + at[i + j + 4]), 1);
    transpose(row, c);
    _mm256_storeu_ps(found + i, cubic(c, _mm256_loadu_ps(place + i)));
  }
#else
  float c[4 * BLOCK];
  for (int i = 0; i < BLOCK; i++) memcpy(c + 4 * i, cubics + at[i], 16);
  EACH found[i] = c[4 * i] + place[i] * (c[4 * i + 1] + place[i] * (c[4 * i + 2] + place[i] * c[4 * i + 3]));
#endif
}

/* The part of a normal distribution below z. It has a table because polynomials, an exponential and a division take
   twice as long, and round more often. */
static void normal_below(const normal *t, const float *z, float *below) {
  int32_t at[BLOCK];
  float place[BLOCK];
  const float steps = t->steps, first = t->first, last = t->last, rounds = 12582912.0f - first;
  EACH { /* NaN has the first interval: what is found is multiplied by z */
    float x = z[i] * steps;
    x = x > first ? x : first;
    x = x < last ? x : last;
    float m = x + rounds; /* whose last bits count intervals */
    place[i] = x - (m - rounds);
    at[i] = 4 * (bits_of(m) & 0xffff);
  }
  cubics_at(t->cubics, at, place, below);
}

/* --- functions ------------------------------------------------------------------------------------------------------ */

/* exp(x) for x <= 0, NaN for NaN: 2^n, in two factors because the result may be subnormal, times a polynomial of what
   remains (least relative error on [-log(2)/2, log(2)/2], 3e-9). The sum m ends in the exponent of 2^(n + 64). */
static inline float exp_(float x) {
  const float rounds = 12582912.0f + 127 + 64;
  float c = x < -104.0f ? -104.0f : x;
  float m = c * 1.44269504088896341f + rounds, n = m - rounds;
  float r = (c - n * 0.693145751953125f) - n * 1.42860677e-6f;
  float square = r * r, p = (1.3813140e-3f * r + 8.3694193e-3f) * square + (4.1668457e-2f * r + 1.6666515e-1f);
  p = (p * r + 4.9999993e-1f) * square + r + 1.0f; /* in pairs, which do not wait for each other */
  return p * float_of((int32_t)((uint32_t)bits_of(m) << 23)) * 0x1p-64f;
}

/* log(1 + x) for x > -1: log(u) with u = 1 + x rounded (musl's logf), times x over what was added. */
static inline float log1p_(float x) {
  float u = 1.0f + x;
  int32_t b = bits_of(u) - 0x3f3504f3, e = b >> 23;
  float f = float_of(bits_of(u) - (int32_t)((uint32_t)e << 23)) - 1.0f, s = f / (2.0f + f), z = s * s, h = 0.5f * f * f;
  float r = z * (0.66666662693f + z * (0.40000972152f + z * (0.28498786688f + z * 0.24279078841f)));
  float log = (float)e * 0.69313812256f + (f - (h - (s * (h + r) + (float)e * 9.0580006145e-6f)));
  float added = u - 1.0f, quotient = x / (added == 0.0f ? 1.0f : added);
  return added == 0.0f ? x : log * quotient;
}

/* Each is the output y and the derivative of one number z; what is not used costs nothing. p is a parameter, e what
   ``prepare`` finds. Python names them in this order. */
#define FUNCTIONS(X) \
  X(gelu) X(gelu_tanh) X(swish) X(mish) X(hardswish) X(relu) X(sigmoid) X(tangent) X(leaky_relu) X(elu) X(softplus) \
  X(logsigmoid) X(squared_relu) X(hardsigmoid)
enum functions {
  GELU, GELU_TANH, SWISH, MISH, HARDSWISH, RELU, SIGMOID, TANGENT, LEAKY_RELU, ELU, SOFTPLUS, LOGSIGMOID, SQUARED_RELU,
  HARDSIGMOID
};

/* The exponentials of a block, or of gelu the part of a normal distribution below z. In a loop of its own, because a
   processor overlaps few turns of a long one, whose instructions wait for each other. */
static void prepare(const kernel *k, const float *z, float *e) {
  const float p = k->parameter;
  switch (k->function) {
    case GELU: normal_below(&k->normal, z, e); break;
    case GELU_TANH: EACH {
      float size = 1.5957691216057308f * __builtin_fabsf(z[i]);
      e[i] = exp_(-size * (1.0f + 0.044715f * z[i] * z[i]));
    } break;
    case SWISH:
    case SOFTPLUS: EACH e[i] = exp_(-__builtin_fabsf(p * z[i])); break;
    case MISH:
    case LOGSIGMOID:
    case SIGMOID: EACH e[i] = exp_(-__builtin_fabsf(z[i])); break;
    case TANGENT: EACH e[i] = exp_(-2.0f * __builtin_fabsf(z[i])); break;
    case ELU: EACH e[i] = exp_(z[i] > 0.0f ? 0.0f : z[i]);
  }
}

static inline void gelu(float z, float p, float e, float *y, float *slope) {
  *y = z * e;
  *slope = e + z * 0.3989422804014327f * exp_(-0.5f * z * z);
}

/* The sigmoid function of x with e = exp(-|x|). */
static inline float sigmoid_(float x, float e) { return (x < 0.0f ? e : 1.0f) / (1.0f + e); }

static inline void swish(float z, float p, float e, float *y, float *slope) {
  float s = sigmoid_(p * z, e);
  *y = z * s;
  *slope = s + p * z * s * (1.0f - s);
}

static inline void gelu_tanh(float z, float p, float e, float *y, float *slope) {
  float s = sigmoid_(z, e), inner = 1.5957691216057308f * z * (1.0f + 0.134145f * z * z);
  *y = z * s;
  *slope = s + inner * s * (1.0f - s);
}

/* tanh(log(1 + u)) = (u^2 + 2u) / (u^2 + 2u + 2) with u = exp(z), both over u^2 where that is above 1. */
static inline void mish(float z, float p, float e, float *y, float *slope) {
  float square = e * e;
  float above = z < 0.0f ? square + 2.0f * e : 1.0f + 2.0f * e, below = above + (z < 0.0f ? 2.0f : 2.0f * square);
  float t = above / below, rise = 4.0f * (1.0f + e) * (z < 0.0f ? e : square) / (below * below);
  *y = z * t;
  *slope = t + z * rise;
}

static inline void hardswish(float z, float p, float e, float *y, float *slope) {
  float c = z + 3.0f;
  c = c < 0.0f ? 0.0f : c;
  c = c > 6.0f ? 6.0f : c;
  *y = z * c / 6.0f; /* as ATen rounds it */
  float middle = (z + z + 3.0f) * 0.166666667f; /* a division would take longer than all else */
  middle = z <= -3.0f ? 0.0f : middle;
  *slope = z >= 3.0f ? 1.0f : middle;
}

static inline void relu(float z, float p, float e, float *y, float *slope) {
  *y = z <= 0.0f ? 0.0f : z;
  *slope = z <= 0.0f ? 0.0f : 1.0f; /* 1 for NaN, as ATen's */
}

static inline void sigmoid(float z, float p, float e, float *y, float *slope) {
  *y = sigmoid_(z, e);
  *slope = *y * (1.0f - *y);
}

/* Near 0 a polynomial (Cephes' tanhf), because the quotient would lose digits there. */
static inline void tangent(float z, float p, float e, float *y, float *slope) {
  float square = z * z, q = -5.70498872745e-3f;
  q = q * square + 2.06390887954e-2f;
  q = q * square - 5.37397155531e-2f;
  q = q * square + 1.33314422036e-1f;
  q = q * square - 3.33332819422e-1f;
  float near = z + z * square * q, far = __builtin_copysignf((1.0f - e) / (1.0f + e), z);
  *y = __builtin_fabsf(z) < 0.625f ? near : far;
  *slope = 1.0f - *y * *y;
}

static inline void leaky_relu(float z, float p, float e, float *y, float *slope) {
  *y = z > 0.0f ? z : p * z;
  *slope = z > 0.0f ? 1.0f : p; /* p for NaN, as ATen's */
}

/* exp(x) - 1 for x <= 0, with e = exp(x). It cancels near 0: there it is its series. */
static inline float expm1_(float x, float e) {
  float q = 1.0f + x * (0.5f + x * (0.16666667f + x * (4.1666668e-2f + x * (8.3333333e-3f + x * 1.3888889e-3f))));
  return x > -0.25f ? x * q : e - 1.0f;
}

static inline void elu(float z, float p, float e, float *y, float *slope) {
  *y = z > 0.0f ? z : p * expm1_(z > 0.0f ? 0.0f : z, e);
  *slope = z > 0.0f ? 1.0f : p * e;
}

static inline void softplus(float z, float p, float e, float *y, float *slope) {
  *y = (z < 0.0f ? 0.0f : z) + log1p_(e) / p;
  *slope = sigmoid_(p * z, e);
}

static inline void logsigmoid(float z, float p, float e, float *y, float *slope) {
  *y = (z > 0.0f ? 0.0f : z) - log1p_(e);
  *slope = sigmoid_(-z, e);
}

static inline void squared_relu(float z, float p, float e, float *y, float *slope) {
  float positive = z <= 0.0f ? 0.0f : z;
  *y = positive * positive;
  *slope = 2.0f * positive;
}

static inline void hardsigmoid(float z, float p, float e, float *y, float *slope) {
  float c = z + 3.0f;
  c = c < 0.0f ? 0.0f : c;
  c = c > 6.0f ? 6.0f : c;
  *y = c / 6.0f;
  float below = z < 3.0f ? 0.166666667f : 0.0f;
  *slope = z > -3.0f ? below : 0.0f;
}

/* The branch bit (derivative/branch_bit.py) of functions that have it in negative outputs, set left of ``position``. */
#define SIGN INT32_MIN
#define MAGNITUDE INT32_MAX
#define INFINITE 0x7f800000
#define LARGEST 0x7f7fffff

/* y with its mark; below the smallest normal number a zero, negative if marked. By masks, because compilers do not
   vectorise choices between numbers of two kinds. */
static inline float marked(float z, float y, float position) {
  int32_t left = -(z < position), bits = bits_of(y);
  int32_t vanishes = -((y > -0x1p-126f) & (y <= float_of(left & INFINITE)));
  int32_t found = (bits & ~(int32_t)((uint32_t)bits >> 31)) | (left & (SIGN | 1));
  return float_of((found & ~vanishes) | (left & vanishes & SIGN));
}

#define OUTPUT_OF(NAME) \
  static void NAME##_output(float p, const float *e, const float *z, float *y) { EACH { \
    float output, slope; \
    NAME(z[i], p, e[i], &output, &slope); \
    y[i] = output; } }
#define BOTH_OF(NAME) \
  static void NAME##_both(float p, const float *e, const float *z, float *y, float *slope) { EACH { \
    float output, derivative; \
    NAME(z[i], p, e[i], &output, &derivative); \
    y[i] = output; \
    slope[i] = derivative; } }
#define SLOPE_OF(NAME) \
  static void NAME##_slope(float p, const float *e, const float *z, float *slope) { EACH { \
    float output, derivative; \
    NAME(z[i], p, e[i], &output, &derivative); \
    slope[i] = derivative; } }
#define MARKED_OF(NAME) \
  static void NAME##_marked(float p, const float *e, float position, const float *z, float *y) { \
    float outputs[BLOCK]; /* with relu's choices in the same loop it is not vectorised; y may be z */ \
    EACH { float slope; NAME(z[i], p, e[i], &outputs[i], &slope); } \
    EACH y[i] = marked(z[i], outputs[i], position); }
FUNCTIONS(OUTPUT_OF)
FUNCTIONS(MARKED_OF)
FUNCTIONS(BOTH_OF)
FUNCTIONS(SLOPE_OF)
#define NAME_OUTPUT(NAME) NAME##_output,
#define NAME_MARKED(NAME) NAME##_marked,
#define NAME_BOTH(NAME) NAME##_both,
#define NAME_SLOPE(NAME) NAME##_slope,
static void (*const outputs_of[])(float, const float *, const float *, float *) = {FUNCTIONS(NAME_OUTPUT)};
static void (*const marked_of[])(float, const float *, float, const float *, float *) = {FUNCTIONS(NAME_MARKED)};
static void (*const both_of[])(float, const float *, const float *, float *, float *) = {FUNCTIONS(NAME_BOTH)};
static void (*const slope_of[])(float, const float *, const float *, float *) = {FUNCTIONS(NAME_SLOPE)};

/* A kernel's function of a block. Without ``slope`` the output, with its mark where the kernel has one; without y the
   derivative; else both, unmarked. */
static void compute(const kernel *k, const float *z, float *y, float *slope) {
  float e[BLOCK];
  prepare(k, z, e);
  if (y == NULL) slope_of[k->function](k->parameter, e, z, slope);
  else if (slope != NULL) both_of[k->function](k->parameter, e, z, y, slope);
  else if (k->mark.is_folded) marked_of[k->function](k->parameter, e, k->mark.position, z, y);
  else outputs_of[k->function](k->parameter, e, z, y);
}

/* --- the derivative from float32 outputs (value_tables.py) ----------------------------------------------------------------- */

/* An interval is all numbers with the same sign, exponent and leading bits, of which this many are left. */
enum { REST = 19 };

static void intervals(const fold_table *t, const float *y, int32_t *index, float *place) {
  const float origin_high = t->origin_high, origin_low = t->origin_low, nearest = t->nearest, tail = t->tail, down = t->down;
  EACH {
    float d = (y[i] - origin_high) - origin_low;
    d = d < nearest ? nearest : d;
    int32_t b = bits_of(y[i]), is_set = b & (int32_t)((uint32_t)b << 31); /* the last bit counts if negative */
    int32_t is_marked = b == SIGN ? SIGN : is_set;
    int32_t of_tail = y[i] > tail ? is_marked : 0, w = of_tail < 0 ? bits_of(y[i] * down) : bits_of(d) | is_marked;
    float rest = (float)(w & ((1 << REST) - 1)) * (1.0f / (1 << REST));
    place[i] = y[i] == y[i] ? rest : y[i];
    index[i] = (w >> (REST - 2) & -4) + (1 << (33 - REST)); /* the first is that of the least w */
  }
}

static void look_up(const table *t, const float *y, float *found) {
  int32_t index[BLOCK];
  float place[BLOCK];
  const float rises = t->rises, middle = t->middle, at_middle = t->at_middle;
  const side lower = t->lower, upper = t->upper;
  EACH {
    float x = rises * y[i], above = upper.sign * ((x - upper.high) - upper.low);
    float below = lower.sign * ((x - lower.high) - lower.low), d = x >= middle ? above : below;
    d = d < 0.0f ? 0.0f : d;
    int32_t w = bits_of(d) | (x >= middle ? SIGN : 0);
    float rest = (float)(w & ((1 << REST) - 1)) * (1.0f / (1 << REST));
    place[i] = y[i] == y[i] ? rest : y[i];
    index[i] = (w >> (REST - 2) & -4) + (1 << (33 - REST));
  }
  cubics_at(t->cubics, index, place, found);
  EACH found[i] = rises * y[i] == middle ? at_middle : found[i];
}

static void look_up_fold(const fold_table *t, const float *y, float *found) {
  int32_t index[BLOCK];
  float place[BLOCK];
  intervals(t, y, index, place);
  cubics_at(t->cubics, index, place, found);
}

/* The derivative of hardswish from y = z (z + 3) / 6, a parabola between its kinks: with d, the distance from its
   minimum less what the mark moves outputs by (``FoldedDerivative.margin``), (2z + 3) / 6 = sqrt(2d / 3). Of z <= -3 it
   is -0. */
static void hardswish_from_output(float margin, const float *y, float *slope) {
  EACH {
    float d = (y[i] + 0.375f) - margin, root = __builtin_sqrtf((d < margin ? margin : d) * 0.666666667f);
    int32_t is_left = y[i] < 0.0f ? bits_of(y[i]) & 1 : 0;
    float sided = is_left ? -root : root, middle = bits_of(y[i]) == SIGN ? 0.0f : sided;
    slope[i] = y[i] >= 3.0f ? 1.0f : middle;
  }
}

/* Derivatives from outputs. */
static void slopes_by_formula(const kernel *k, const float *y, float *slope) {
  const float p = k->parameter;
  switch (k->function) {
    case RELU: EACH slope[i] = y[i] > 0.0f ? 1.0f : 0.0f; break;
    case SIGMOID: EACH slope[i] = y[i] * (1.0f - y[i]); break;
    case TANGENT: EACH slope[i] = 1.0f - y[i] * y[i]; break;
    case LEAKY_RELU: EACH slope[i] = y[i] > 0.0f ? 1.0f : p; break;
    case ELU: EACH slope[i] = y[i] > 0.0f ? 1.0f : y[i] + p; break;
    case SOFTPLUS: EACH slope[i] = -expm1_(-p * y[i], exp_(-p * y[i])); break;
    case LOGSIGMOID: EACH slope[i] = -expm1_(y[i], exp_(y[i])); break;
    case SQUARED_RELU: EACH {
      float largest = float_of(LARGEST), finite = y[i] > largest ? largest : y[i]; /* a gradient of 0 must give 0 */
      slope[i] = y[i] <= 0.0f ? 0.0f : 2.0f * __builtin_sqrtf(finite);
    } break;
    case HARDSIGMOID: EACH {
      float below = y[i] < 1.0f ? 0.166666667f : 0.0f;
      slope[i] = y[i] > 0.0f ? below : 0.0f;
    } break;
    case HARDSWISH: hardswish_from_output(p, y, slope);
  }
}

/* --- passes --------------------------------------------------------------------------------------------------------- */

typedef struct {
  const kernel *k;
  const char *in[3];
  char *out[2];
  const float *bias;   /* along the channels, or NULL */
  int sums;            /* whether it sums along the channels what it writes */
  float *partial;
} pass;

/* The same for the channels of a block. */
typedef struct {
  const float *bias; /* as many numbers as the block has, or NULL */
  float *sum;        /* BLOCK numbers, of which a block of n updates the first n */
} channels;

/* A block of n <= BLOCK numbers from ``at`` on. */
typedef void step(const pass *p, int64_t at, int n, const channels *c);

/* The block itself where it is whole, else a padded copy. */
static const void *block_of(const char *from, int64_t at, int n, int size, void *copy) {
  if (n == BLOCK) return from + at * size;
  memset(copy, 0, BLOCK * size);
  return memcpy(copy, from + at * size, (size_t)n * size);
}

static void fetch(const char *to, int64_t at, int size) {
  for (int i = 0; i < BLOCK * size; i += 64) __builtin_prefetch(to + at * size + i + AHEAD, 1);
}

static void put(char *to, int64_t at, int n, int size, const void *from) { memcpy(to + at * size, from, (size_t)n * size); }

static void add(float *x, const float *y) { EACH x[i] += y[i]; }

/* z, with what is added to it, in float32. */
static const float *pre_activation(const pass *p, int64_t at, int n, const float *bias, float *x) {
  const int dtype = p->k->dtype, size = dtype == FLOAT32 ? 4 : 2;
  float more[BLOCK];
  if (dtype == FLOAT32) {
    const float *z = block_of(p->in[0], at, n, size, x);
    if (bias == NULL && p->in[1] == NULL) return z;
    if (z != x) memcpy(x, z, sizeof more);
    if (bias != NULL) FIRST_N x[i] += bias[i];
    if (p->in[1] != NULL) add(x, block_of(p->in[1], at, n, size, more));
  } else {
    uint16_t half[BLOCK];
    widen(dtype, block_of(p->in[0], at, n, size, half), x);
    if (bias != NULL) FIRST_N x[i] += bias[i];
    if (p->in[1] != NULL) {
      widen(dtype, block_of(p->in[1], at, n, size, half), more);
      add(x, more);
    }
  }
  return x;
}

static void forward_step(const pass *p, int64_t at, int n, const channels *c) {
  const kernel *k = p->k;
  const float *bias = c->bias;
  if (p->in[0] != p->out[0]) fetch(p->out[0], at, k->dtype == FLOAT32 ? 4 : 2);
  if (k->dtype == FLOAT32) {
    float x[BLOCK], last[BLOCK];
    const float *z = pre_activation(p, at, n, bias, x);
    float *y = n == BLOCK ? (float *)p->out[0] + at : last;
    compute(k, z, y, NULL);
    if (n < BLOCK) put(p->out[0], at, n, 4, y);
  } else {
    uint16_t half[BLOCK];
    const uint16_t *z = half;
    if (bias == NULL && p->in[1] == NULL) z = block_of(p->in[0], at, n, 2, half);
    else {
      float x[BLOCK];
      narrow(k->dtype, pre_activation(p, at, n, bias, x), half);
    }
    const uint16_t *values = k->values;
    uint16_t *y = (uint16_t *)p->out[0] + at;
    for (int i = 0; i < n; i++) y[i] = values[z[i]];
  }
}

/* A block of a tensor of dtype k->dtype, in float32. */
static const float *wide_block(const kernel *k, const char *from, int64_t at, int n, float *x) {
  if (k->dtype == FLOAT32) return block_of(from, at, n, 4, x);
  uint16_t half[BLOCK];
  widen(k->dtype, block_of(from, at, n, 2, half), x);
  return x;
}

static void put_wide(const kernel *k, char *to, int64_t at, int n, const float *x) {
  uint16_t half[BLOCK];
  if (k->dtype != FLOAT32) narrow(k->dtype, x, half);
  put(to, at, n, k->dtype == FLOAT32 ? 4 : 2, k->dtype == FLOAT32 ? (const void *)x : half);
}

/* in: z, y of a function that torch has computed. */
static void encode_step(const pass *p, int64_t at, int n, const channels *c) {
  float x[BLOCK], y[BLOCK], out[BLOCK];
  const float *z = block_of(p->in[0], at, n, 4, x), *of_z = block_of(p->in[1], at, n, 4, y), position = p->k->mark.position;
  EACH out[i] = marked(z[i], of_z[i], position);
  put(p->out[0], at, n, 4, out);
}

/* The activation of z and its derivative. */
static void activate(const kernel *k, const char *from, int64_t at, int n, float *y, float *slope) {
  if (k->outputs == NULL) {
    float z[BLOCK];
    const float *block = wide_block(k, from, at, n, z);
    compute(k, block, y, slope);
  } else {
    uint16_t half[BLOCK];
    const uint16_t *z = block_of(from, at, n, 2, half);
    const float *outputs = k->outputs, *slopes = k->slopes;
    EACH y[i] = outputs[z[i]];
    if (slope != NULL) EACH slope[i] = slopes[z[i]];
  }
}

/* in: dy and what was saved. Of float32 the derivative from the input is the function's own, that from the output
   a table or a formula. */
static void slopes_of(const kernel *k, const float *saved, float *slope) {
  if (k->slope.cubics != NULL) look_up_fold(&k->slope, saved, slope);
  else if (k->table.cubics != NULL) look_up(&k->table, saved, slope);
  else if (k->is_from_output) slopes_by_formula(k, saved, slope);
  else compute(k, saved, NULL, slope);
}

static void gradient_step(const pass *p, int64_t at, int n, const channels *c) {
  const kernel *k = p->k;
  const int is_direct = k->dtype == FLOAT32 && n == BLOCK;
  float slope[BLOCK], saved[BLOCK], wide[BLOCK], *dz = is_direct ? (float *)p->out[0] + at : slope;
  if (p->in[1] != p->out[0]) fetch(p->out[0], at, k->dtype == FLOAT32 ? 4 : 2);
  if (k->dtype != FLOAT32) {
    uint16_t half[BLOCK];
    const float *slopes = k->slopes;
    const uint16_t *bits = block_of(p->in[1], at, n, 2, half);
    if (slopes != NULL) EACH slope[i] = slopes[bits[i]];
    else {
      widen(k->dtype, bits, saved);
      EACH saved[i] = float_of(bits_of(saved[i]) | (bits[i] & 1)); /* the mark, where float32 numbers have theirs */
      slopes_of(k, saved, slope);
    }
  } else slopes_of(k, block_of(p->in[1], at, n, 4, saved), slope);
  const float *dy = wide_block(k, p->in[0], at, n, wide);
  EACH dz[i] = slope[i] * dy[i];
  if (!is_direct) put_wide(k, p->out[0], at, n, dz);
  float *sum = c->sum;
  if (p->sums) FIRST_N sum[i] += dz[i];
}

/* in: z and the other factor. */
static void gate_step(const pass *p, int64_t at, int n, const channels *c) {
  float y[BLOCK], x[BLOCK];
  if (p->in[0] != p->out[0]) fetch(p->out[0], at, p->k->dtype == FLOAT32 ? 4 : 2);
  activate(p->k, p->in[0], at, n, y, NULL);
  const float *up = wide_block(p->k, p->in[1], at, n, x);
  EACH y[i] *= up[i];
  put_wide(p->k, p->out[0], at, n, y);
}

/* in: dy, z and the other factor; out: their gradients, which may overwrite them. */
static void gate_gradient_step(const pass *p, int64_t at, int n, const channels *c) {
  float y[BLOCK], slope[BLOCK], wide_dy[BLOCK], wide_up[BLOCK];
  activate(p->k, p->in[1], at, n, y, slope);
  const float *dy = wide_block(p->k, p->in[0], at, n, wide_dy), *up = wide_block(p->k, p->in[2], at, n, wide_up);
  EACH slope[i] *= dy[i] * up[i];
  EACH y[i] *= dy[i];
  put_wide(p->k, p->out[0], at, n, slope);
  put_wide(p->k, p->out[1], at, n, y);
}

/* Rows of a tile of columns, or a piece of a row. Partial sums are laid out (group of rows, column) or (row, piece). */
static void columns_task(const pass *p, step *one, const layout *l, int64_t group, int64_t tile) {
  const int64_t rows = (l->count + l->columns - 1) / l->columns, first = tile * TILE;
  const int64_t end = first + TILE < l->columns ? first + TILE : l->columns;
  float sum[TILE] = {0};
  for (int64_t row = group * ROWS; row < (group + 1) * ROWS && row < rows; row++)
    for (int64_t column = first; column < end; column += BLOCK) {
      const int64_t at = row * l->columns + column;
      int64_t n = end - column < BLOCK ? end - column : BLOCK;
      n = l->count - at < n ? l->count - at : n; /* the last row may be shorter */
      const channels c = {p->bias == NULL ? NULL : p->bias + column, sum + (column - first)};
      if (n > 0) one(p, at, (int)n, &c);
    }
  if (p->sums) memcpy(p->partial + group * l->columns + first, sum, (size_t)(end - first) * 4);
}

/* The sum of x, which it overwrites: in halves, which compilers vectorise. Short rows have little else to do. */
static double sum_of_block(float *x) {
  for (int half = BLOCK / 2; half >= LANES; half /= 2) { _Pragma("omp simd") for (int i = 0; i < half; i++) x[i] += x[i + half]; }
  double total = x[0];
  for (int i = 1; i < LANES; i++) total += x[i];
  return total;
}

static void piece_task(const pass *p, step *one, const layout *l, int64_t row, int64_t piece, int64_t task) {
  const int64_t first = piece * PIECE, end = first + PIECE < l->columns ? first + PIECE : l->columns;
  float bias[BLOCK], sum[BLOCK] = {0};
  const channels c = {p->bias == NULL ? NULL : bias, sum};
  if (p->bias != NULL) EACH bias[i] = p->bias[row % l->channels];
  for (int64_t column = first; column < end; column += BLOCK)
    one(p, row * l->columns + column, (int)(end - column < BLOCK ? end - column : BLOCK), &c);
  if (p->sums) p->partial[task] = (float)sum_of_block(sum);
}

static float sum_of(const float *x, int n) {
  float total = 0.0f;
  _Pragma("omp simd reduction(+ : total)") for (int i = 0; i < n; i++) total += x[i];
  return total;
}

/* Rows that would not fill blocks: here a block holds parts of several. Rows repeat after a ``period``: the bias of a
   block, and its sums, are those of PERIODS periods. Partial sums are laid out (group of periods, row of a period). */
static void short_rows_task(const pass *p, step *one, const layout *l, int64_t period, int64_t group, int64_t first,
                            int64_t last) {
  float bias[BLOCK], sum[BLOCK], *totals = p->sums ? p->partial + group * period : NULL;
  const channels c = {p->bias == NULL ? NULL : bias, sum};
  for (int64_t row = first; p->sums && row < last; row++) totals[row] = 0.0f;
  for (int64_t at = first * l->columns; at < last * l->columns; at += BLOCK) {
    const int64_t rest = last * l->columns - at, row = at / l->columns;
    const int n = (int)(rest < BLOCK ? rest : BLOCK);
    int ends[BLOCK], parts = 0; /* part i is of row + i, and ends before ends[i] */
    for (int64_t end = (row + 1) * l->columns - at; !parts || ends[parts - 1] < n; end += l->columns)
      ends[parts++] = (int)(end < n ? end : n);
    int64_t channel = row % l->channels;
    for (int part = 0, i = 0; part < parts; i = ends[part++]) {
      for (int j = i; p->bias != NULL && j < ends[part]; j++) bias[j] = p->bias[channel];
      if (++channel == l->channels) channel = 0;
    }
    memset(sum, 0, sizeof sum);
    for (int64_t turn = group * PERIODS; turn < (group + 1) * PERIODS; turn++) {
      const int64_t from = turn * period * l->columns + at, left = l->count - from; /* the last period may be shorter */
      if (left > 0) one(p, from, (int)(left < n ? left : n), &c);
    }
    for (int part = 0, i = 0; p->sums && part < parts; i = ends[part++])
      totals[row + part] += sum_of(sum + i, ends[part] - i);
  }
}

static int64_t over(int64_t count, int64_t size) { return (count + size - 1) / size; }

/* Go through all blocks. ``sums`` receives those along the channels, in the kernel's dtype. Returns 0, or 1 where there is
   no memory. */
static int walk(pass *p, step *one, const layout *l, void *sums) {
  const int by_columns = l->axis == ALONG_COLUMNS;
  /* Of longer rows the last block, which is padded, is a small part. */
  const int are_short = l->axis == ALONG_ROWS && l->columns < 4 * BLOCK && l->columns % BLOCK;
  const int64_t rows = over(l->count, l->columns), run = over(RUN, l->columns), samples = over(run, l->channels);
  const int64_t period = are_short && samples * l->channels < rows ? samples * l->channels : rows;
  /* A task is one of ``parts`` of a group of rows, which has as many partial sums as ``width`` says. */
  const int64_t together = by_columns ? ROWS : are_short ? PERIODS * period : 1, groups = over(rows, together);
  const int64_t parts = by_columns ? over(l->columns, TILE) : are_short ? over(period, run) : over(l->columns, PIECE);
  const int64_t width = by_columns ? l->columns : are_short ? period : parts, size = groups * width;
  const int64_t tasks = groups * parts;
  p->sums = sums != NULL;
  if (p->sums && (p->partial = malloc((size_t)size * 4)) == NULL) return 1;
#pragma omp parallel for schedule(static) num_threads(l->threads) if (l->threads > 1)
  for (int64_t task = 0; task < tasks; task++) {
    const int64_t group = task / parts, part = task % parts, first = part * run;
    if (by_columns) columns_task(p, one, l, group, part);
    else if (are_short) short_rows_task(p, one, l, period, group, first, first + run < period ? first + run : period);
    else piece_task(p, one, l, group, part, task);
  }
  for (int64_t channel = 0; p->sums && channel < l->channels; channel++) {
    double total = 0;
    if (by_columns || are_short) /* a channel may have several columns, or rows of a period */
      for (int64_t i = channel; i < size; i += l->channels) total += p->partial[i];
    else
      for (int64_t row = channel; row < rows; row += l->channels)
        for (int64_t i = row * parts; i < (row + 1) * parts; i++) total += p->partial[i];
    put_wide(p->k, sums, channel, 1, (float[BLOCK]){(float)total});
  }
  free(p->partial);
  return 0;
}

/* --- what Python calls ---------------------------------------------------------------------------------------------- */

int forward(const kernel *k, const void *z, const float *bias, const void *residual, void *y, const layout *l) {
  pass p = {.k = k, .in = {z, residual}, .out = {y}, .bias = bias};
  return walk(&p, forward_step, l, NULL);
}

int encode_outputs(const kernel *k, const void *z, const void *y, void *out, const layout *l) {
  pass p = {.k = k, .in = {z, y}, .out = {out}};
  return walk(&p, encode_step, l, NULL);
}

int gradient(const kernel *k, const void *dy, const void *saved, void *dz, void *db, const layout *l) {
  pass p = {.k = k, .in = {dy, saved}, .out = {dz}};
  return walk(&p, gradient_step, l, db);
}

int gate(const kernel *k, const void *z, const void *up, void *out, const layout *l) {
  pass p = {.k = k, .in = {z, up}, .out = {out}};
  return walk(&p, gate_step, l, NULL);
}

int gate_gradient(const kernel *k, const void *dy, void *z, void *up, const layout *l) {
  pass p = {.k = k, .in = {dy, z, up}, .out = {z, up}};
  return walk(&p, gate_gradient_step, l, NULL);
}
