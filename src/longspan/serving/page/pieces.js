// A text as pieces: {text, bits, top, look}. `top` are the alternatives of a generated token, `look` is the number of
// the token in an inspection. Tokens can be parts of characters, so places are counted in bytes.

const encoder = new TextEncoder();
export const bytesOf = (text) => encoder.encode(text);

// From the events of a stream: tokens without text yet (parts of a character) are added to the next piece.
export function collector() {
  let bits = 0;
  let tokens = 0;
  return (choice) => {
    const marks = choice.logprobs;
    for (const nats of marks?.token_logprobs ?? []) {
      bits += nats === null ? 0 : Math.max(0, -nats / Math.LN2);
      tokens += 1;
    }
    if (choice.text === "") return null;
    const piece = { text: choice.text, bits: tokens > 0 ? bits : undefined, tokens, top: marks?.top_logprobs?.at(-1), token: marks?.tokens.at(-1) };
    bits = tokens = 0;
    return piece;
  };
}

// The end of a text, at most `most` bytes, not cut within a character.
export function tail(text, most) {
  const bytes = bytesOf(text);
  if (bytes.length <= most) return text;
  let from = bytes.length - most;
  while ((bytes[from] & 0xc0) === 0x80) from += 1;
  return new TextDecoder().decode(bytes.subarray(from));
}

// Where each token of an inspection ends in the text, in bytes; null if they do not make up the text.
function ends(text, tokens) {
  const bytes = bytesOf(text);
  const found = [];
  let at = 0;
  for (const { text: token } of tokens) {
    const plain = bytesOf(token);
    const equal = plain.every((byte, index) => bytes[at + index] === byte);
    // Bytes that are no whole character are written as \xe2.
    at += equal ? plain.length : bytesOf(token.replace(/\\x[0-9a-f]{2}/g, ".")).length;
    found.push(at);
  }
  return at === bytes.length ? found : null;
}

// The pieces with what an inspection of the text's end says: `look` for all of that end, and tokens with bits where
// only text was known.
export function inspected(pieces, text, tokens) {
  const places = ends(text, tokens);
  if (!places) return null;
  const bytes = bytesOf(text);
  const decoder = new TextDecoder();
  const made = [];
  let at = bytes.length - pieces.reduce((sum, piece) => sum + bytesOf(piece.text).length, 0); // before the end: negative
  let token = 0;
  for (const piece of pieces) {
    const begin = at;
    at += bytesOf(piece.text).length;
    if (at <= 0) {
      made.push(piece);
    } else if (piece.bits !== undefined) {
      while (places[token] < at) token += 1;
      made.push({ ...piece, look: token });
    } else {
      if (begin < 0) made.push({ ...piece, text: new TextDecoder().decode(bytesOf(piece.text).subarray(0, -begin)) });
      let from = Math.max(0, begin);
      let bits = 0;
      while (token < places.length && places[token] <= at) {
        if (places[token] > from) {
          bits += tokens[token].bits ?? 0;
          if ((bytes[places[token]] & 0xc0) !== 0x80) {
            made.push({ text: decoder.decode(bytes.subarray(from, places[token])), bits, look: token });
            from = places[token];
            bits = 0;
          }
        }
        token += 1;
      }
      if (from < at) made.push({ text: decoder.decode(bytes.subarray(from, at)), look: Math.min(token, places.length - 1) });
    }
  }
  return made;
}
