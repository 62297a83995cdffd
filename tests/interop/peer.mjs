// A peer of js-libp2p that does what the lines on its standard input say, and answers each with a line of JSON.
// Its argument is JSON: { listen: [multiaddr, …], relay: whether it relays, mdns: whether it looks around,
// dht: whether it takes part in the DHT as a server }.
import { createInterface } from 'node:readline'
import { noise } from '@chainsafe/libp2p-noise'
import { yamux } from '@chainsafe/libp2p-yamux'
import { circuitRelayServer, circuitRelayTransport } from '@libp2p/circuit-relay-v2'
import { identify } from '@libp2p/identify'
import { kadDHT, passthroughMapper } from '@libp2p/kad-dht'
import { mdns } from '@libp2p/mdns'
import { ping } from '@libp2p/ping'
import { tcp } from '@libp2p/tcp'
import { multiaddr } from '@multiformats/multiaddr'
import { createLibp2p } from 'libp2p'

Promise.withResolvers ??= () => { // which Node.js 20 lacks
  const made = {}
  made.promise = new Promise((resolve, reject) => Object.assign(made, { resolve, reject }))
  return made
}

const ECHO = '/echo'
const given = JSON.parse(process.argv[2])
// two at a time: by itself it identifies each new connection, and may not be done when a test asks for it
const services = { identify: identify({ maxOutboundStreams: 2 }), ping: ping() }
if (given.relay) services.relay = circuitRelayServer()
if (given.dht) {
  services.dht = kadDHT({ protocol: '/ipfs/kad/1.0.0', clientMode: false, peerInfoMapper: passthroughMapper })
}
const node = await createLibp2p({
  addresses: { listen: given.listen ?? [] },
  transports: [tcp(), circuitRelayTransport()],
  connectionEncrypters: [noise()],
  streamMuxers: [yamux()],
  peerDiscovery: given.mdns ? [mdns({ interval: 500 })] : [],
  connectionGater: { denyDialMultiaddr: () => false }, // loopback addresses are dialed
  services
})
const found = []
node.addEventListener('peer:discovery', ({ detail }) => found.push(detail))
await node.handle(ECHO, async ({ stream }) => { await stream.sink(stream.source) }, { runOnLimitedConnection: true })

const commands = {
  addresses: () => node.getMultiaddrs().map(String),
  identify: async ({ to }) => {
    const said = await node.services.identify.identify(await node.dial(multiaddr(to)))
    return {
      peer: said.peerId.toString(),
      agent: said.agentVersion,
      protocols: said.protocols,
      addresses: said.listenAddrs.map(String),
      observed: said.observedAddr?.toString()
    }
  },
  ping: async ({ to }) => await node.services.ping.ping(multiaddr(to)),
  // sends so many bytes and returns how many come back, and whether they are the same
  echo: async ({ to, size }) => {
    const stream = await node.dialProtocol(multiaddr(to), ECHO, { runOnLimitedConnection: true })
    const sent = Buffer.alloc(size, 'interoperable ')
    const parts = []
    await Promise.all([
      stream.sink((function * () {
        for (let start = 0; start < size; start += 10_000) yield sent.subarray(start, start + 10_000)
      })()),
      (async () => { for await (const part of stream.source) parts.push(Buffer.from(part.subarray())) })()
    ])
    const back = Buffer.concat(parts)
    return { size: back.length, same: back.equals(sent) }
  },
  found: () => found.map((one) => ({ peer: one.id.toString(), addresses: one.multiaddrs.map(String) }))
}

const print = (line) => process.stdout.write(JSON.stringify(line) + '\n')
print({ peer: node.peerId.toString(), addresses: node.getMultiaddrs().map(String) })
for await (const line of createInterface({ input: process.stdin })) {
  const asked = JSON.parse(line)
  try {
    print({ result: await commands[asked.do](asked) ?? null })
  } catch (error) {
    print({ error: String(error) })
  }
}
await node.stop()
