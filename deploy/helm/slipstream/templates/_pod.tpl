{{/* The pod of a server. `.role`: leader (which serves) or worker (of several nodes). */}}
{{- define "slipstream.pod" -}}
{{- $p := include "slipstream.parallelism" .root | fromJson -}}
{{- $role := .role -}}
{{- with .root -}}
{{- $kubernetes := .Values.kubernetes | default dict -}}
metadata:
  labels:
    {{- include "slipstream.labels" . | nindent 4 }}
    slipstream/role: {{ $role }}
  {{- with $kubernetes.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "slipstream.account" . }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  # The first process of the pod reaps what a server's processes leave behind.
  shareProcessNamespace: true
  # The hook that drains counts from the same moment.
  terminationGracePeriodSeconds: {{ add (int .Values.drainSeconds) 30 }}
  securityContext:
    {{- include "slipstream.pod-security" . | nindent 4 }}
  {{- include "slipstream.pull-secrets" . | nindent 2 }}
  {{- with $kubernetes.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $kubernetes.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  tolerations:
    - key: nvidia.com/gpu
      operator: Exists
      effect: NoSchedule
    {{- with $kubernetes.tolerations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with .Values.gpu }}
  affinity:
    nodeAffinity:
      requiredDuringSchedulingIgnoredDuringExecution:
        nodeSelectorTerms:
          - matchExpressions:
              - key: nvidia.com/gpu.product
                operator: In
                values:
                  {{- (kindIs "slice" . | ternary . (list .)) | toYaml | nindent 18 }}
  {{- end }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "slipstream.selector" . | nindent 10 }}
  initContainers:
    {{- include "slipstream.compose" (dict "root" . "tensor" $p.tensor "pipeline" $p.pipeline) | nindent 4 }}
  containers:
    {{- include "slipstream.server" (dict "root" . "p" $p "role" $role) | nindent 4 }}
  volumes:
    - name: checkpoints
      persistentVolumeClaim:
        claimName: {{ include "slipstream.claim" . }}
    - name: repository
      emptyDir: {}
    - name: tmp
      emptyDir: {}
    - name: dshm
      emptyDir:
        medium: Memory
        sizeLimit: {{ .Values.triton.sharedMemory }}
    - name: cache
      {{- if .Values.triton.cacheClaim }}
      persistentVolumeClaim:
        claimName: {{ .Values.triton.cacheClaim }}
      {{- else }}
      emptyDir: {}
      {{- end }}
    {{- with (.Values.apiKeys | default dict).secret }}
    - name: api-keys
      secret:
        secretName: {{ . }}
        items:
          - key: keys
            path: keys
    {{- end }}
{{- end -}}
{{- end -}}

{{/* Writes the model repository, once the checkpoint is there. */}}
{{- define "slipstream.compose" -}}
{{- $tensor := .tensor -}}
{{- $pipeline := .pipeline -}}
{{- with .root -}}
{{- if .Values.model.download.repository }}
- name: wait
  image: {{ .Values.triton.image.name }}
  imagePullPolicy: {{ .Values.triton.image.imagePullPolicy | default "IfNotPresent" }}
  command: [sh, -c, 'until [ -e "$0" ]; do echo "waiting for the download: $0"; sleep 5; done']
  args: [{{ include "slipstream.marker" . | quote }}]
  securityContext:
    {{- include "slipstream.container-security" . | nindent 4 }}
  resources:
    requests: {cpu: 10m, memory: 32Mi}
    limits: {cpu: 100m, memory: 64Mi}
  volumeMounts:
    - {name: checkpoints, mountPath: /checkpoints, readOnly: true}
{{- end }}
- name: compose
  image: {{ .Values.triton.image.name }}
  imagePullPolicy: {{ .Values.triton.image.imagePullPolicy | default "IfNotPresent" }}
  command: [/opt/slipstream/engine/bin/slipstream]
  args:
    - compose
    - --checkpoint={{ include "slipstream.checkpoint" . }}
    - --output=/repository
    - --model-name={{ .Values.model.name }}
    {{- with (.Values.model.tensorrtLlm | default dict).dataType }}
    - --dtype={{ . }}
    {{- end }}
    {{- if gt (int $tensor) 1 }}
    - --tensor-parallel={{ $tensor }}
    {{- end }}
    {{- if gt (int $pipeline) 1 }}
    - --pipeline-parallel={{ $pipeline }}
    {{- end }}
    {{- if .Values.inferencePool.kvEvents }}
    - --kv-events=tcp://0.0.0.0:5557,5558
    - --kv-events-topic=kv@$(POD_IP):9000@{{ .Values.model.name }}
    {{- end }}
    {{- range .Values.model.composeOptions }}
    - {{ . | quote }}
    {{- end }}
  {{- if .Values.inferencePool.kvEvents }}
  env:
    - name: POD_IP
      valueFrom:
        fieldRef: {fieldPath: status.podIP}
  {{- end }}
  securityContext:
    {{- include "slipstream.container-security" . | nindent 4 }}
  resources:
    requests: {cpu: "1", memory: 2Gi}
    limits: {cpu: "2", memory: 4Gi}
  volumeMounts:
    - {name: checkpoints, mountPath: /checkpoints, readOnly: true}
    - {name: repository, mountPath: /repository}
    - {name: tmp, mountPath: /tmp}
{{- end -}}
{{- end -}}

{{- define "slipstream.server" -}}
{{- $p := .p -}}
{{- $role := .role -}}
{{- with .root -}}
{{- $health := list "/opt/slipstream/engine/bin/slipstream" "health" "--grpc-port=8001" -}}
{{- $period := int .Values.probes.periodSeconds -}}
- name: triton
  image: {{ .Values.triton.image.name }}
  imagePullPolicy: {{ .Values.triton.image.imagePullPolicy | default "IfNotPresent" }}
  {{- if eq $role "worker" }}
  {{- if (.Values.multiNode | default dict).workerCommand }}
  command:
    {{- toYaml .Values.multiNode.workerCommand | nindent 4 }}
  {{- else }}
  command: [/opt/slipstream/engine/bin/slipstream]
  args:
    - rank
    - --model-repository=/repository
    - --start-timeout={{ .Values.probes.startSeconds }}
  {{- end }}
  {{- else }}
  command: [/opt/slipstream/engine/bin/slipstream]
  args:
    - serve
    - --model-repository=/repository
    - --host=0.0.0.0
    - --log-file=/dev/stderr
    - --start-timeout={{ .Values.probes.startSeconds }}
    {{- if (.Values.apiKeys | default dict).secret }}
    - --api-key-file=/etc/slipstream/keys
    {{- end }}
    {{- range .Values.triton.serveOptions }}
    - {{ . | quote }}
    {{- end }}
  ports:
    - {name: http, containerPort: 8000}
    - {name: grpc, containerPort: 8001}
    - {name: metrics, containerPort: 8002}
    - {name: openai, containerPort: 9000}
    {{- if .Values.inferencePool.kvEvents }}
    - {name: kv-events, containerPort: 5557}
    - {name: kv-replays, containerPort: 5558}
    {{- end }}
  startupProbe:
    exec:
      command: {{ toJson $health }}
    periodSeconds: {{ $period }}
    timeoutSeconds: 5
    failureThreshold: {{ div (add (int .Values.probes.startSeconds) (sub $period 1)) $period }}
  # A server that drains is alive; one that repairs itself gets a minute.
  livenessProbe:
    exec:
      command: {{ toJson (append $health "--live") }}
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 6
  readinessProbe:
    exec:
      command: {{ toJson $health }}
    periodSeconds: {{ $period }}
    timeoutSeconds: 5
    failureThreshold: 2
  lifecycle:
    preStop:
      exec:
        command:
          - /opt/slipstream/engine/bin/slipstream
          - drain
          - --delay={{ .Values.drainDelaySeconds }}
          - --timeout={{ .Values.drainSeconds }}
  {{- end }}
  env:
    - {name: TMPDIR, value: /tmp}
    - {name: XDG_CACHE_HOME, value: /cache}
    - {name: HF_HUB_OFFLINE, value: "1"}
    {{- if gt (int $p.nodes) 1 }}
    # What torch.distributed's rendezvous reads, of the LeaderWorkerSet's own.
    - {name: MASTER_ADDR, value: $(LWS_LEADER_ADDRESS)}
    - {name: MASTER_PORT, value: "29500"}
    - {name: NNODES, value: {{ $p.nodes | quote }}}
    - {name: NODE_RANK, value: $(LWS_WORKER_INDEX)}
    - {name: NCCL_NVLS_ENABLE, value: "0"}
    {{- with (.Values.multiNode | default dict).keySecret }}
    - name: SLIPSTREAM_RANK_KEY
      valueFrom:
        secretKeyRef: {name: {{ . }}, key: key}
    {{- end }}
    {{- end }}
    {{- with .Values.triton.environment }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  securityContext:
    {{- include "slipstream.container-security" . | nindent 4 }}
  {{- $resources := .Values.triton.resources | default dict }}
  {{- $efa := int ($resources.efa | default 0) }}
  resources:
    {{- range list "requests" "limits" }}
    {{ . }}:
      cpu: {{ $resources.cpu | default 4 | quote }}
      memory: {{ $resources.memory | default "32Gi" | quote }}
      nvidia.com/gpu: {{ $p.gpus }}
      {{- if $efa }}
      vpc.amazonaws.com/efa: {{ $efa }}
      {{- end }}
    {{- end }}
  volumeMounts:
    - {name: checkpoints, mountPath: /checkpoints, readOnly: true}
    - {name: repository, mountPath: /repository}
    - {name: tmp, mountPath: /tmp}
    - {name: dshm, mountPath: /dev/shm}
    - {name: cache, mountPath: /cache}
    {{- if (.Values.apiKeys | default dict).secret }}
    - {name: api-keys, mountPath: /etc/slipstream, readOnly: true}
    {{- end }}
{{- end -}}
{{- end -}}
