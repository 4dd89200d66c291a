// Asks an inferq model for one answer and prints it. Nothing here is ours but the wire contract:
// a msgpack map published to a topic exchange, answered to a reply queue. Read ask() first.

import { randomUUID } from 'node:crypto';
import { parseArgs } from 'node:util';
import { decode, encode } from '@msgpack/msgpack';
import amqplib from 'amqplib';

const JOBS_EXCHANGE = 'inferq.jobs';
const CONTENT_TYPE = 'application/msgpack';
// Part of the time left that stays for the CPU fallback when no GPU worker takes the message.
const CPU_RESERVE = 0.3;
// How long after the deadline to keep listening: a late answer is still an answer.
const GRACE_MS = 2000;

/** A float32 tensor as the contract wants it: dtype by name, shape with the batch axis first, raw little-endian bytes. */
function float32Tensor(values, shape) {
  const count = shape.reduce((product, length) => product * length, 1);
  if (count !== values.length) {
    throw new Error(`shape ${shape.join('x')} needs ${count} values, ${values.length} were given`);
  }
  const data = Buffer.alloc(values.length * 4);
  values.forEach((value, index) => data.writeFloatLE(value, index * 4));
  return { dtype: 'float32', shape, data };
}

/** The number arrays of the answer; other dtypes than these are shown as their bytes. */
function numbers({ dtype, shape, data, ref }) {
  if (ref) return { dtype, shape, ref };
  if (dtype === 'string') return { dtype, shape, values: data };
  const bytes = Buffer.from(data);
  const readers = {
    float32: [4, (at) => bytes.readFloatLE(at)],
    float64: [8, (at) => bytes.readDoubleLE(at)],
    int32: [4, (at) => bytes.readInt32LE(at)],
    int64: [8, (at) => Number(bytes.readBigInt64LE(at))],
    uint8: [1, (at) => bytes.readUInt8(at)],
    bool: [1, (at) => bytes.readUInt8(at) !== 0],
  };
  if (!(dtype in readers)) return { dtype, shape, data_base64: bytes.toString('base64') };
  const [width, read] = readers[dtype];
  return { dtype, shape, values: Array.from({ length: bytes.length / width }, (_, index) => read(index * width)) };
}

/** Resolves once the broker has the message on a queue; rejects when it has no queue for it, or refuses it. */
function publishConfirmed(channel, routingKey, body, properties) {
  return new Promise((resolve, reject) => {
    // The broker returns an unroutable message first and confirms it afterwards, so the return decides.
    channel.once('return', () => {
      reject(new Error(
        `no queue for "${routingKey}" (model.lane): check the lane (by default interactive and bulk) and the model's name, ` +
        'or add them with "inferq topology add-model NAME --lanes A,B"',
      ));
    });
    channel.publish(JOBS_EXCHANGE, routingKey, body, { ...properties, mandatory: true }, (error) => {
      if (error) reject(new Error(`the broker refused the job, its queue is full: ${error.message}`));
      else resolve();
    });
  });
}

/** Publishes one job and waits for its answer, at most until the deadline and a little more. */
async function ask(connection, { model, lane, inputs, deadlineMs }) {
  const channel = await connection.createConfirmChannel();
  const id = randomUUID();
  const { queue } = await channel.assertQueue(`reply.${randomUUID()}`, { exclusive: true, autoDelete: true, durable: false });
  let timer;
  const answer = new Promise((resolve, reject) => {
    timer = setTimeout(
      () => reject(new Error(`no answer to job ${id} in time; it may still come: inferq result ${id}`)),
      deadlineMs + GRACE_MS,
    );
    channel
      .consume(queue, (message) => {
        if (message === null) reject(new Error('the reply queue was deleted'));
        else if (message.properties.correlationId === id) resolve(decode(message.content));
      }, { noAck: true })
      .catch(reject);
  });
  // Whoever fails first tells; without this a failed publish would leave the other rejection unheard.
  answer.catch(() => {});
  try {
    const now = Date.now();
    const job = { v: 1, id, model, inputs, deadline_unix_ms: now + deadlineMs, sent_unix_ms: now };
    await publishConfirmed(channel, `${model}.${lane}`, Buffer.from(encode(job)), {
      correlationId: id,
      replyTo: queue,
      contentType: CONTENT_TYPE,
      deliveryMode: 2,
      messageId: randomUUID(), // of this attempt; the job's identity is its id
      expiration: String(Math.round(deadlineMs * (1 - CPU_RESERVE))),
    });
    return await answer;
  } finally {
    clearTimeout(timer);
    await channel.close();
  }
}

const USAGE = `usage: node index.js --model NAME [options]

  --url URL          the broker (default: INFERQ_BROKER__URL, else amqp://guest:guest@127.0.0.1:5672/)
  --model NAME       a model that a worker serves
  --lane NAME        which of the model's queues (default: interactive)
  --input NAME       name of the input (default: x)
  --shape N,M        its shape, batch axis first (default: 1,4)
  --values A,B,...   its values, float32 (default: 5.1,3.5,1.4,0.2)
  --deadline-ms MS   how long the answer is of use (default: 10000)`;

/** "1,2.5" as numbers; anything else would travel as NaN, and a model would answer it. */
function numberList(name, text, fits = Number.isFinite) {
  return text.split(',').map((part) => {
    const number = part.trim() === '' ? NaN : Number(part);
    if (!fits(number)) throw new Error(`--${name}: "${part}" is not a fitting number; write --${name} 1,4`);
    return number;
  });
}

const isCount = (number) => Number.isInteger(number) && number >= 1;

function readArguments() {
  const { values } = parseArgs({
    options: {
      help: { type: 'boolean', short: 'h', default: false },
      url: { type: 'string', default: process.env.INFERQ_BROKER__URL ?? 'amqp://guest:guest@127.0.0.1:5672/' },
      model: { type: 'string' },
      lane: { type: 'string', default: 'interactive' },
      input: { type: 'string', default: 'x' },
      shape: { type: 'string', default: '1,4' },
      values: { type: 'string', default: '5.1,3.5,1.4,0.2' },
      'deadline-ms': { type: 'string', default: '10000' },
    },
  });
  if (values.help) return null;
  if (!values.model) throw new Error('--model is missing: the name of a model that a worker serves; see --help');
  const [deadlineMs, ...more] = numberList('deadline-ms', values['deadline-ms'], isCount);
  if (more.length) throw new Error('--deadline-ms: give one number of milliseconds');
  return {
    url: values.url,
    model: values.model,
    lane: values.lane,
    inputs: {
      [values.input]: float32Tensor(numberList('values', values.values), numberList('shape', values.shape, isCount)),
    },
    deadlineMs,
  };
}

async function main() {
  const given = readArguments();
  if (given === null) {
    console.log(USAGE);
    return;
  }
  const { url, ...question } = given;
  const connection = await amqplib.connect(url, { timeout: 10_000 });
  try {
    const { status, error, outputs = {}, ...rest } = await ask(connection, question);
    const shown = Object.fromEntries(Object.entries(outputs).map(([name, tensor]) => [name, numbers(tensor)]));
    console.log(JSON.stringify({ status, error, outputs: shown, ...rest }, null, 2));
    if (status !== 'ok') process.exitCode = 1;
  } finally {
    await connection.close();
  }
}

main().catch((error) => {
  console.error(error.message);
  process.exitCode = 1;
});
