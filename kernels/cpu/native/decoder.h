// All layers of a decoder, one phase of the team after the other.
//
// What a phase computes is what the op of the same name computes alone, bit for bit: both call the same function on the
// same rows. Here the rows of a step go through without a copy between ops, and gates are quantized where they are made.
#pragma once

#include "arena.h"
#include "attention.h"
#include "linear.h"
#include "norm.h"
#include "rope.h"
#include "team.h"

namespace tercet {

// Biases may be null. The matrices' shapes fit together (kernels/ops.py: DecoderLayer), and gate_up is_gated.
struct DecoderLayer {
    const float* attention_norm;
    const Matrix* qkv;
    const float* qkv_bias;
    const Matrix* output;
    const float* output_bias;
    const float* mlp_norm;
    const Matrix* gate_up;
    const Matrix* down;
};

struct Decoder {
    const DecoderLayer* layers;
    int64_t count;
    float eps;
};

// What all layers of a step share. Of `attention` the pages, the queries and the result are left open.
struct DecoderStep {
    AttentionStep attention;
    const AttentionItem* items;
    int64_t item_count;
    int64_t rows;
    const float* cos;  // [rows][head_dim / 2]
    const float* sin;
    const int64_t* slots;
};

// Where rows lie between two phases.
struct DecoderBuffers {
    Activations normed;    // [rows][N]
    float* qkv;            // [rows][qkv_columns], the queries rotated in place
    Activations attended;  // [rows][heads * head_dim]
    Activations gated;     // [rows][I]
    float* row;            // [threads][row_columns]
    int64_t row_columns;
    char* attention;  // [threads][attention_bytes]
    int64_t attention_bytes;

    float* row_of(int thread) const { return row + thread * row_columns; }
};

inline int qkv_columns(const AttentionShape& shape) {
    return (shape.heads + 2 * shape.pages.kv_heads) * shape.pages.head_dim;
}

// With room for whatever number of planes a matrix reads.
inline Activations activations_in(Arena& arena, int rows, int cols) {
    auto* x = arena.take<float>(int64_t{rows} * cols);
    auto* bytes = arena.take<uint8_t>(QuantizedRows::bytes(rows, cols, MOST_PLANES));
    return {QuantizedRows::in(bytes, rows, cols, MOST_PLANES), x, cols, rows};
}

inline Activations read_by(const Matrix& reader, Activations x) {
    x.quantized.planes = reader.planes;
    return x;
}

inline DecoderBuffers buffers_in(Arena& arena, const DecoderLayer& layer, const AttentionShape& shape, int rows,
                                 int threads) {
    DecoderBuffers out{};
    const int cols = layer.qkv->cols;
    out.normed = activations_in(arena, rows, cols);
    out.qkv = arena.take<float>(int64_t{rows} * qkv_columns(shape));
    out.attended = activations_in(arena, rows, layer.output->cols);
    out.gated = activations_in(arena, rows, layer.down->cols);
    out.row_columns = (std::max(cols, shape.pages.head_dim) + LANES - 1) / LANES * LANES;
    out.row = arena.take<float>(threads * out.row_columns);
    out.attention_bytes = AttentionScratch::bytes(shape);
    out.attention = arena.take<char>(threads * out.attention_bytes);
    return out;
}

// Rows that a thread takes at a time where each is little work.
constexpr int FEW_ROWS = 2;

template <class Work>
inline void each_rows(Team& team, int rows, int of_chunk, Work&& work) {
    team.each(ceil_div(rows, of_chunk), [&](int chunk, int thread) {
        work(chunk * of_chunk, std::min(rows, (chunk + 1) * of_chunk), thread);
    });
}

// rms_norm(x), as the matrix wants to read it.
inline void norm_rows(Team& team, const float* x, const float* weight, float eps, const Matrix& reader,
                      const DecoderBuffers& buffers) {
    const Activations out = read_by(reader, buffers.normed);
    each_rows(team, out.rows, FEW_ROWS, [&](int begin, int end, int thread) {
        for (int row = begin; row < end; row++) {
            const int64_t at = int64_t{row} * reader.cols;
            float* to = reader.floats ? const_cast<float*>(out.x) + at : buffers.row_of(thread);
            rms_norm(x + at, weight, eps, reader.cols, to);
            if (reader.planes) quantize_row(to, row, out.quantized);
        }
    });
}

inline void quantize_rows(Team& team, const Matrix& reader, const Activations& rows) {
    if (!reader.planes) return;
    const Activations x = read_by(reader, rows);
    each_rows(team, x.rows, FEW_ROWS, [&](int begin, int end, int) {
        for (int row = begin; row < end; row++) quantize_row(x.x + row * x.pitch, row, x.quantized);
    });
}

inline void multiply(Team& team, const Matrix& matrix, const Activations& rows, const Result& result) {
    const Activations x = read_by(matrix, rows);
    const Chunks chunks = chunks_of(matrix.count, x.rows, team.size());
    team.each(chunks.count(), [&](int chunk, int) {
        linear(matrix, x, chunks.panels_range(chunk), chunks.tiles_range(chunk), result);
    });
}

inline void rotate_rows(Team& team, const DecoderStep& step, const DecoderBuffers& buffers, bf16* key_pages,
                        bf16* value_pages) {
    const AttentionShape& shape = step.attention.shape;
    const int64_t stride = qkv_columns(shape);
    const RopeStep rope{shape.pages, shape.heads,  buffers.qkv, stride,      step.cos,    step.sin,
                        nullptr,     step.slots, key_pages,   value_pages, buffers.qkv, stride};
    each_rows(team, static_cast<int>(step.rows), FEW_ROWS,
              [&](int begin, int end, int thread) { rope_and_cache(rope, begin, end, buffers.row_of(thread)); });
}

inline void attend_rows(Team& team, const DecoderStep& step, const DecoderBuffers& buffers, const bf16* key_pages,
                        const bf16* value_pages) {
    AttentionStep attention = step.attention;
    attention.queries = buffers.qkv;
    attention.query_stride = qkv_columns(attention.shape);
    attention.key_pages = key_pages;
    attention.value_pages = value_pages;
    attention.out = const_cast<float*>(buffers.attended.x);
    attention.out_stride = buffers.attended.pitch;
    team.each(static_cast<int>(step.item_count), [&](int item, int thread) {
        AttentionScratch scratch(attention.shape, buffers.attention + thread * buffers.attention_bytes);
        attend(attention, step.items, step.item_count, item, scratch);
    });
}

// silu(gate) * up, as `down` wants to read it.
inline void gate_rows(Team& team, const Matrix& gate_up, const Matrix& down, const DecoderBuffers& buffers) {
    const Activations x = read_by(gate_up, buffers.normed);
    const Activations out = read_by(down, buffers.gated);
    if (gated_spans(gate_up) && !down.floats) {
        const Chunks chunks = chunks_of(out.quantized.spans(), x.rows, team.size());
        team.each(chunks.count(), [&](int chunk, int) {
            gated(gate_up, x, chunks.panels_range(chunk), chunks.tiles_range(chunk), out.quantized);
        });
        return;
    }
    const Chunks chunks = chunks_of(gate_up.count / 2, x.rows, team.size());
    team.each(chunks.count(), [&](int chunk, int) {
        gated(gate_up, x, chunks.panels_range(chunk), chunks.tiles_range(chunk), const_cast<float*>(out.x), out.pitch);
    });
    quantize_rows(team, down, out);
}

// x [rows][N] goes through all layers in its place. pages of each layer. buffer: decoder_bytes, aligned to 64 bytes.
inline void run_decoder(Team& team, const Decoder& decoder, const DecoderStep& step, bf16* const* key_pages,
                        bf16* const* value_pages, float* x, void* buffer) {
    Arena arena(buffer);
    const int rows = static_cast<int>(step.rows);
    const DecoderBuffers buffers = buffers_in(arena, decoder.layers[0], step.attention.shape, rows, team.size());
    for (int64_t i = 0; i < decoder.count; i++) {
        const DecoderLayer& layer = decoder.layers[i];
        const int64_t cols = layer.qkv->cols, qkv = qkv_columns(step.attention.shape);
        norm_rows(team, x, layer.attention_norm, decoder.eps, *layer.qkv, buffers);
        multiply(team, *layer.qkv, buffers.normed, {buffers.qkv, qkv, layer.qkv_bias, nullptr, 0});
        rotate_rows(team, step, buffers, key_pages[i], value_pages[i]);
        attend_rows(team, step, buffers, key_pages[i], value_pages[i]);
        quantize_rows(team, *layer.output, buffers.attended);
        multiply(team, *layer.output, buffers.attended, {x, cols, layer.output_bias, x, cols});
        norm_rows(team, x, layer.mlp_norm, decoder.eps, *layer.gate_up, buffers);
        gate_rows(team, *layer.gate_up, *layer.down, buffers);
        multiply(team, *layer.down, buffers.gated, {x, cols, nullptr, x, cols});
    }
}

// Of the buffer of a step of so many rows.
inline int64_t decoder_bytes(const Decoder& decoder, const AttentionShape& shape, int rows, int threads) {
    Arena arena(nullptr);
    buffers_in(arena, decoder.layers[0], shape, rows, threads);
    return arena.used();
}

}  // namespace tercet
