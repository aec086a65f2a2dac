#include "decoder.h"

using namespace tercet;

TERCET_EXPORT int64_t tercet_decoder_bytes(const Decoder* decoder, const AttentionShape* shape, int rows, int threads) {
    return decoder_bytes(*decoder, *shape, rows, threads);
}

// As run_decoder.
TERCET_EXPORT void tercet_decoder(Team* team, const Decoder* decoder, const DecoderStep* step, bf16* const* key_pages,
                                  bf16* const* value_pages, float* x, void* buffer) {
    if (step->rows > 0 && decoder->count > 0) run_decoder(*team, *decoder, *step, key_pages, value_pages, x, buffer);
}
